"""Log-likelihoods: estimators, and batches of them."""
