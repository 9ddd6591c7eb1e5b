"""Checkpoints: the folder format, remote buckets, and loading a model."""
