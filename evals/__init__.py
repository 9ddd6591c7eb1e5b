"""Verifiable tasks, scoring and Pareto reports for diffusion language models."""
