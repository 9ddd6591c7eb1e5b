"""The neural indicator (NI sampling, arXiv 2604.18471): a small network that judges, position by position, whether the
token a masked position would get now is the one it would get in the end.

    indicator = load_indicator("indicators/llada-8b")
    scores = indicator.scores(hidden, embeddings, values)          # [..., ] in (0, 1)

Like a model's, its parameters are a flat dict of arrays; on disk it is a folder with `indicator.json`, the config, and
`indicator/`, the parameters in Orbax's format. `python -m convert ni-indicator` makes one from the published file.
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import storage
from dllm_jax.checkpoints import checkpoint
from dllm_jax.errors import DllmError
from dllm_jax.pytree import pytree

CONFIG_FILE, PARAMS_FOLDER = "indicator.json", "indicator"
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class IndicatorConfig:
    """Shape of an indicator; the defaults are the published one for LLaDA-8B.

    Attributes:
        depth: blocks of the network.
        width: features of each input after its projection, and of every block's output.
        hidden_dim: D, of the model's hidden states.
        embed_dim: E, of the model's input embeddings.
        num_values: K2, how many of the largest scores over the vocabulary are read; 0 reads none.
        num_tokens: K1, how many of the best tokens' embeddings are read, at least the best.
        probabilities: whether these scores are probabilities over the whole vocabulary, or else logits.
        mix: whether the projected inputs are mixed by one more matrix before the blocks.
    """

    depth: int = 5
    width: int = 768
    hidden_dim: int = 4096
    embed_dim: int = 4096
    num_values: int = 100
    num_tokens: int = 4
    probabilities: bool = True
    mix: bool = False

    def __post_init__(self) -> None:
        least = {"depth": 1, "width": 1, "hidden_dim": 1, "embed_dim": 1, "num_values": 0, "num_tokens": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise DllmError(f"{name} of the indicator is {value!r}; it must be a whole number of at least {low}")
        for name in ("probabilities", "mix"):
            if not isinstance(getattr(self, name), bool):
                raise DllmError(f"{name} of the indicator is {getattr(self, name)!r}; it must be true or false")

    @property
    def input_width(self) -> int:
        """Features of the projected inputs together."""
        return self.width * (2 + (self.num_values > 0) + (self.num_tokens > 1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by flat name; kernels are [in, out]."""
        wide, width = self.input_width, self.width
        found = _dense("hidden_proj", self.hidden_dim, width) | _dense("token_proj", self.embed_dim, width)
        if self.num_values:
            found |= _dense("values_proj", self.num_values, width)
        if self.num_tokens > 1:
            found |= _dense("others_proj", (self.num_tokens - 1) * self.embed_dim, width)
        if self.mix:
            found |= _dense("mix", wide, wide)
        for number in range(self.depth):
            into, name = wide if number == 0 else width, f"blocks.{number}"
            found |= {f"{name}.norm.scale": (into,), f"{name}.norm.bias": (into,)}
            found |= _dense(f"{name}.up", into, 4 * into) | _dense(f"{name}.down", 4 * into, width)
            if into != width:
                found |= _dense(f"{name}.shortcut", into, width)
        return found | {"norm.scale": (width,), "norm.bias": (width,)} | _dense("head", width, 2)

    def check_vocabulary(self, size: int) -> int:
        """How many of the best tokens are read, of a vocabulary of `size`.

        Raises:
            DllmError: when it has fewer.
        """
        most = max(self.num_values, self.num_tokens)
        if most > size:
            raise DllmError(f"the indicator reads the {most} best tokens and the model has {size}; use its own")
        return most

    @property
    def num_params(self) -> int:
        """Number of parameters: 84,272,642 for the published one."""
        return sum(math.prod(shape) for shape in self.shapes().values())


def _dense(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.kernel": (rows, columns), f"{name}.bias": (columns,)}


@pytree(static=("config",))
class Indicator:
    """The network with its parameters: a pytree, so that they are arguments of a compiled program.

    Attributes:
        config: its shape.
        params: the arrays that `config.shapes` lists. Matrices are multiplied in the dtype of their inputs' kernel,
            sums, norms and the softmax are float32.
    """

    config: IndicatorConfig
    params: Mapping[str, jax.Array]

    def __str__(self) -> str:
        return f"{self.config.num_params:,} parameters"

    def logits(
        self,
        hidden: jax.Array,
        embeddings: jax.Array,
        values: jax.Array,
        dropout: tuple[jax.Array, float] | None = None,
    ) -> jax.Array:
        """The two scores, "wait" and "commit", of every position.

        Args:
            hidden: [..., D], last hidden states after the final norm.
            embeddings: [..., K1, E], input embeddings of the best tokens, the one that would be written first.
            values: [..., K2], their scores in falling order, as `config.probabilities` says.
            dropout: for training, a typed key and the share in [0, 1) of each block's hidden units, and of what the
                block adds, that are left out; the rest is scaled up.

        Returns:
            [..., 2] float32.
        """
        z = jnp.concatenate(self._project(hidden, embeddings, values), axis=-1)
        z = self._linear("mix", z) if self.config.mix else z
        for number in range(self.config.depth):
            name = f"blocks.{number}"
            y = jax.nn.gelu(self._linear(f"{name}.up", self._norm(f"{name}.norm", z)), approximate=False)
            y = self._linear(f"{name}.down", _drop_out(y, dropout, 2 * number))
            shortcut = self._linear(f"{name}.shortcut", z) if f"{name}.shortcut.kernel" in self.params else z
            z = shortcut + _drop_out(y, dropout, 2 * number + 1)
        return self._linear("head", self._norm("norm", z))

    def scores(self, hidden: jax.Array, embeddings: jax.Array, values: jax.Array) -> jax.Array:
        """Probability that the position may be committed, [...] float32; arguments as in `logits`."""
        return jax.nn.softmax(self.logits(hidden, embeddings, values), axis=-1)[..., 1]

    def _project(self, hidden: jax.Array, embeddings: jax.Array, values: jax.Array) -> list[jax.Array]:
        parts = [self._linear("hidden_proj", hidden), self._linear("token_proj", embeddings[..., 0, :])]
        if self.config.num_values:
            parts.append(self._linear("values_proj", values))
        if self.config.num_tokens > 1:
            others = embeddings[..., 1:, :]
            parts.append(self._linear("others_proj", others.reshape(*others.shape[:-2], -1)))
        return parts

    def _linear(self, name: str, x: jax.Array) -> jax.Array:
        kernel = self.params[f"{name}.kernel"]
        product = jnp.einsum("...i,io->...o", x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)
        return product + self.params[f"{name}.bias"].astype(jnp.float32)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
        scale, bias = (self.params[f"{name}.{part}"].astype(jnp.float32) for part in ("scale", "bias"))
        return (x - mean) * jax.lax.rsqrt(variance + NORM_EPS) * scale + bias


def _drop_out(x: jax.Array, dropout: tuple[jax.Array, float] | None, place: int) -> jax.Array:
    """x with dropout; each place in the network has draws of its own."""
    if dropout is None:
        return x
    key, rate = dropout
    kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0)


def init_indicator(config: IndicatorConfig, key: jax.Array, dtype: str = "float32") -> Indicator:
    """An untrained indicator: kernels uniform within 1 / sqrt(inputs), biases 0, scales 1.

    A parameter depends on the key and its name alone.
    """

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        if not name.endswith(".kernel"):
            return (jnp.ones if name.endswith(".scale") else jnp.zeros)(shape, dtype)
        bound = 1 / math.sqrt(shape[0])
        return jax.random.uniform(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, dtype, -bound, bound)

    return Indicator(config, {name: make(name, shape) for name, shape in config.shapes().items()})


def save_indicator(
    out: str | Path, indicator: Indicator, *, source: Mapping[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Writes a folder that `load_indicator` reads; it appears whole at the end.

    Args:
        source: notes about where it comes from.

    Raises:
        DllmError: when names or shapes are not the config's, `out` exists, or the disk is full.
    """
    from orbax.checkpoint import v1 as ocp  # here, because it takes a second to import

    check_indicator(indicator, "the indicator")
    with storage.atomic_folder(out, overwrite=overwrite) as scratch, checkpoint.without_other_processes():
        try:
            ocp.save(scratch / PARAMS_FOLDER, dict(indicator.params))
            (scratch / CONFIG_FILE).write_text(json.dumps(dataclasses.asdict(indicator.config), indent=2) + "\n")
            if source:
                (scratch / checkpoint.SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n")
        except Exception as error:  # Orbax raises whatever its storage layer does
            raise storage.write_error(out, error) from error


def load_indicator(folder: str | Path, dtype: str | None = None) -> Indicator:
    """Reads what `save_indicator` or `python -m convert ni-indicator` wrote, onto the first device.

    Args:
        dtype: "float32" or "bfloat16"; as stored by default.

    Raises:
        DllmError: for a folder that holds no indicator, or a damaged one.
    """
    from orbax.checkpoint import v1 as ocp

    folder = checkpoint.local_folder(folder)
    config = read_config(folder)
    try:
        stored = ocp.metadata((folder / PARAMS_FOLDER).resolve()).metadata
        wanted = {name: np.empty(entry.shape, entry.dtype) for name, entry in dict(stored).items()}
        arrays = dict(ocp.load((folder / PARAMS_FOLDER).resolve(), wanted))
    except Exception as error:  # Orbax raises whatever its storage layer does
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DllmError(f"the indicator in {folder} could not be read ({first}); make it again") from error
    found = Indicator(config, {name: jnp.asarray(x, dtype) for name, x in arrays.items()})
    check_indicator(found, str(folder))
    return found


def read_config(folder: Path) -> IndicatorConfig:
    """The config of an indicator's folder.

    Raises:
        DllmError: when there is none, or it is not one of ours.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        hint = "make one with python -m convert ni-indicator or python -m train indicator"
        raise DllmError(f"{folder} holds no indicator (it has no {CONFIG_FILE}); {hint}")
    try:
        return IndicatorConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DllmError(f"{path} is no indicator's config ({error}); make it again") from None


def check_indicator(indicator: Indicator, where: str) -> None:
    """Raises DllmError unless the parameters are those of the config."""
    wanted, found = indicator.config.shapes(), {name: tuple(x.shape) for name, x in indicator.params.items()}
    if wanted != found:
        name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise DllmError(f"{where} has {name} of shape {found.get(name)}, its config wants {wanted.get(name)}")
