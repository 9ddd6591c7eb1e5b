"""The command line of `python -m samplers`."""
