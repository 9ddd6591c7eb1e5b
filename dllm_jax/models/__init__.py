"""The Transformer backbones, their layers, KV buffers, and the denoiser that samplers and training run."""
