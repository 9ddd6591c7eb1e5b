"""The conformance kit: it passes what is right, and names what is broken."""

import jax
import jax.numpy as jnp
import pytest
from conftest import refuses
from train_toys import DREAM, LLADA

from dllm_jax import Denoiser, FunctionDenoiser, make_mesh, param_shardings
from dllm_jax.config import Experts
from dllm_jax.models.denoiser import Span
from dllm_jax.parallel.sharding import Layout
from dllm_jax.params.specs import init_params
from dllm_jax.pytree import pytree
from dllm_jax.testing import check_denoiser

MOE = LLADA.replace(family="llada-moe", qk_norm=True, experts=Experts(4, 2, 16))
CAUSAL = DREAM.replace(family="qwen2", attention="causal", tied_embeddings=True)
CONFIGS = {"llada": LLADA, "dream": DREAM, "llada-moe": MOE, "causal": CAUSAL}
EVERY = [
    "ids and sizes",
    "finite logits",
    "context",
    "spans of outputs",
    "tiles of the vocabulary",
    "padding",
    "rows are independent",
    "vmap",
    "windows",
    "spans of outputs within windows",
    "write masks",
    "scattered positions",
    "block-causal attention",
    "embeddings",
    "expected embeddings",
]


def weights(config):
    params = init_params(config, jax.random.key(1), dtype="float32")
    return {name: x * 25 if x.ndim > 1 else x for name, x in params.items()}  # far from uniform


@pytest.mark.parametrize("name", CONFIGS)
def test_our_own_denoisers_pass(name):
    assert check_denoiser(Denoiser(CONFIGS[name], weights(CONFIGS[name]))) == EVERY


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_denoiser_on_a_mesh_passes():
    config, mesh = LLADA.replace(num_heads=4, num_kv_heads=2), make_mesh(data=2, tensor=2)
    params = jax.device_put(weights(config), dict(param_shardings(config, mesh)))
    tokens = jax.random.randint(jax.random.key(3), (4, 20), 0, config.vocab_size)
    found = check_denoiser(Denoiser(config, params, Layout(mesh)), tokens=tokens, key=jax.random.key(4))
    assert found == EVERY


def test_the_parts_that_a_function_has_are_checked():
    def fn(params, tokens, lengths):
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        x = params[tokens] * valid[..., None]
        return jnp.cos(x + jnp.cumsum(x, axis=1) * 0.3 + x.sum(axis=1, keepdims=True))

    denoiser = FunctionDenoiser(fn, 10, 9, jax.random.normal(jax.random.key(0), (11, 11)))
    assert check_denoiser(denoiser) == EVERY[: EVERY.index("windows")]


# Broken ones ---------------------------------------------------------------------------------------------------------


@pytree()
class BeyondLengths(Denoiser):
    """Attends to padding."""

    def forward(self, inputs, visible, **options):
        return super().forward(inputs, jnp.full_like(visible, inputs.shape[1]), **options)


@pytree()
class NeighboursSeen(Denoiser):
    """Reads the first tokens of all rows."""

    def forward(self, inputs, visible, **options):
        hidden, kv = super().forward(inputs, visible, **options)
        return hidden + 0.1 * self.embed(inputs[:, 0]).sum(axis=0), kv


@pytree()
class WritesAll(Denoiser):
    """Ignores `write`."""

    def forward(self, inputs, visible, *, write=None, **options):
        return super().forward(inputs, visible, **options)


@pytree()
class WritesNothing(Denoiser):
    """Gives back the buffers as they were."""

    def forward(self, inputs, visible, *, kv=None, **options):
        hidden, new = super().forward(inputs, visible, kv=kv, **options)
        return hidden, new if kv is None else kv


@pytree()
class ReadsItsOwn(Denoiser):
    """Attends to the keys that it computed anew where the buffers' should be read."""

    def forward(self, inputs, visible, *, kv=None, write=None, **options):
        _, new = super().forward(inputs, visible, kv=kv, write=write, **options)
        return super().forward(inputs, visible, kv=kv, **options)[0], new


@pytree()
class ShiftedOnce(Denoiser):
    """Of a window, predicts the position behind each."""

    def forward(self, inputs, visible, *, at=None, kv=None, write=None, outputs=None):
        if at is None:
            return super().forward(inputs, visible, outputs=outputs)
        unshifted = Denoiser(self.config.replace(shift=False), self.params)
        return unshifted.forward(inputs, visible, at=at, kv=kv, write=write, outputs=outputs)


@pytree()
class FirstOutputs(Denoiser):
    """Takes a window's outputs from its start."""

    def forward(self, inputs, visible, *, at=None, outputs=None, **options):
        if isinstance(at, Span) and outputs is not None:
            outputs = Span(at.start, outputs.width)
        return super().forward(inputs, visible, at=at, outputs=outputs, **options)


@pytree()
class OneLength(Denoiser):
    """Lets every query see what the last one sees."""

    def forward(self, inputs, visible, **options):
        return super().forward(inputs, visible if visible.ndim == 1 else visible.max(axis=1), **options)


@pytree()
class FirstTile(Denoiser):
    """Always scores the first entries."""

    def logits(self, hidden, tile=None):
        return super().logits(hidden, None if tile is None else tile._replace(start=0))


@pytree()
class OtherRoom(Denoiser):
    """Has buffers of another layout than its forwards give."""

    def empty_cache(self, batch, length):
        return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), super().empty_cache(batch, length))


@pytree()
class PlainEmbedding(Denoiser):
    """Scales embeddings for nobody but itself."""

    def embed(self, tokens):
        return 2 * super().embed(tokens)


@pytree()
class OtherMask(Denoiser):
    """Has a mask token beyond its vocabulary."""

    mask_id = LLADA.vocab_size


BROKEN = {  # what the sentence has
    BeyondLengths: "after a row's length",
    NeighboursSeen: "a row alone",
    WritesAll: "buffer 0",
    WritesNothing: "buffer 0",
    ReadsItsOwn: "reads keys or values",
    FirstOutputs: "outputs within a window",
    OneLength: "a later block",
    FirstTile: "a tile of the vocabulary",
    OtherRoom: "[3, 24, 2, 8]",
    PlainEmbedding: "embeddings",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_broken_ones_are_named(broken):
    with refuses(BROKEN[broken], kind=AssertionError):
        check_denoiser(broken(LLADA, weights(LLADA)))


def test_a_shift_that_windows_forget_is_named():
    with refuses("a forward over a window", kind=AssertionError):
        check_denoiser(ShiftedOnce(DREAM, weights(DREAM)))


def test_weights_in_which_no_mistake_would_show_are_refused():
    mute = {name: x * 0 if ".attn.o_proj" in name else x for name, x in weights(LLADA).items()}
    with refuses("larger weights", kind=AssertionError):
        check_denoiser(Denoiser(LLADA, mute))
    with refuses("row 0, position 0", kind=AssertionError):
        check_denoiser(Denoiser(LLADA, {name: x * jnp.nan for name, x in mute.items()}))


def test_what_is_no_denoiser_is_refused():
    class Plain:
        """No pytree."""

    with refuses("Plain", "pytree", kind=AssertionError):
        check_denoiser(Plain())
    with refuses("mask_id 24", kind=AssertionError):
        check_denoiser(OtherMask(LLADA, weights(LLADA)))
    denoiser = Denoiser(LLADA, weights(LLADA))
    with refuses("[1, 12]"):
        check_denoiser(denoiser, tokens=jnp.zeros((1, 12), jnp.int32))
    with refuses("[12, 3]"):
        check_denoiser(denoiser, tokens=jnp.zeros((2, 12), jnp.int32), lengths=jnp.array([12, 3]))
