"""Training of diffusion language models: `python -m train COMMAND --config FILE.toml key=value ...`, where COMMAND is
masked-diffusion, block-diffusion, d2f, autoregressive, compression, grpo, or indicator, which trains a small network
that reads a frozen model.

    from train import read_config, train

    result = train(read_config("run.toml", ["steps=100"]))
    model = dllm_jax.load(result.folder)

See `train.config` for the settings, `train.objectives` for the losses and their settings, `train.data` for the data
(`evals.trajectories` makes data of a model's own generations), `train.trainable` for what can be trained, and
`train.run_dir` for what a run writes.
"""

from train.config import TrainConfig
from train.lora import add_adapters, load_adapters, merge_adapters
from train.losses import Batch, Noised, diffusion_loss
from train.multihost_stop import Interrupted
from train.objectives import read_config
from train.objectives.masked_diffusion import corrupt
from train.trainer import TrainResult, train, write_weights

__all__ = [
    "Batch",
    "Interrupted",
    "Noised",
    "TrainConfig",
    "TrainResult",
    "add_adapters",
    "corrupt",
    "diffusion_loss",
    "load_adapters",
    "merge_adapters",
    "read_config",
    "train",
    "write_weights",
]
