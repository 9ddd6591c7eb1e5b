"""From the vocabulary head to tokens: statistics, draws, noise, guidance, smoothing."""
