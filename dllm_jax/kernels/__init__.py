"""Attention and expert kernels: XLA's reference, Pallas backends, and where a backend can run."""
