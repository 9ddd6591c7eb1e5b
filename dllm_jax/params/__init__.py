"""Parameters: their specs, how each is initialized and stored, and products with kernels of every form."""
