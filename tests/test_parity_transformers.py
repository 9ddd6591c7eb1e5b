"""The backbone against the PyTorch models of transformers: small, random weights, float32, CPU. See `make parity`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import dllm_jax
from dllm_jax.config import Experts, ModelConfig
from dllm_jax.families.hub_config import HubConfig
from dllm_jax.families.nemotron import read_yarn
from dllm_jax.models.denoiser import Denoiser, Span

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5  # on logits whose standard deviation is about one
LENGTHS = np.array([13, 9], np.int32)  # of a right-padded batch

LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
QWEN2 = (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
QWEN3 = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
QWEN3_MOE = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
MINISTRAL3 = (transformers.Ministral3Config, transformers.Ministral3ForCausalLM)
YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 4},
    **{"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3},
}
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False, head_dim=16)

# Nemotron-Labs-Diffusion is Ministral 3, read causally or with a block that sees all of itself.
# A LLaDA checkpoint is Llama without its causal mask, a Dream one is Qwen2 and a LLaDA-MoE one Qwen3-MoE without it.
MODELS = {
    "llama": (LLAMA, dict(kv_heads=4, tied=False)),
    "llama-gqa": (LLAMA, dict(kv_heads=2, tied=False)),
    "llama-tied": (LLAMA, dict(kv_heads=1, tied=True)),
    "qwen2": (QWEN2, dict(kv_heads=4, tied=False)),
    "qwen2-gqa": (QWEN2, dict(kv_heads=2, tied=False)),
    "qwen2-gqa-tied": (QWEN2, dict(kv_heads=2, tied=True)),
    "ministral3": (MINISTRAL3, dict(kv_heads=2, tied=False, head_dim=32, sliding_window=None, rope_parameters=YARN)),
    "moe": (QWEN3_MOE, dict(kv_heads=4, tied=False, **MOE)),
    "moe-gqa-dense-layer": (QWEN3_MOE, dict(kv_heads=2, tied=False, mlp_only_layers=[1], **MOE)),
}

NAMES = {
    r"model\.embed_tokens\.weight": r"embed.embedding",
    r"model\.norm\.weight": r"final_norm.scale",
    r"lm_head\.weight": r"lm_head.kernel",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"layers.\1.attn_norm.scale",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"layers.\1.mlp_norm.scale",
    r"model\.layers\.(\d+)\.self_attn\.(\w+_norm)\.weight": r"layers.\1.attn.\2.scale",
    r"model\.layers\.(\d+)\.self_attn\.(\w+)\.weight": r"layers.\1.attn.\2.kernel",
    r"model\.layers\.(\d+)\.self_attn\.(\w+)\.bias": r"layers.\1.attn.\2.bias",
    r"model\.layers\.(\d+)\.mlp\.gate\.weight": r"layers.\1.mlp.router",
    r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj": r"layers.\1.mlp.w_in",
    r"model\.layers\.(\d+)\.mlp\.experts\.down_proj": r"layers.\1.mlp.w_out",
    r"model\.layers\.(\d+)\.mlp\.(\w+)\.weight": r"layers.\1.mlp.\2.kernel",
}


def reference(architecture, *, kv_heads, tied, **more):
    """A transformers model whose every weight is random: its own initialiser leaves biases zero and norms one."""
    config_class, model_class = architecture
    plain = {"rope_type": "default", "rope_theta": 500.0}  # turns visibly within a few positions
    config = config_class(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=more.pop("rope_parameters", plain),
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="eager",
        **more,
    )
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else noise / 8)
    return model


def denoiser(model, attention, shift):
    """The same weights in our backbone."""
    theirs = model.config
    is_qwen2 = isinstance(theirs, transformers.Qwen2Config)
    is_moe = isinstance(theirs, transformers.Qwen3MoeConfig)
    config = ModelConfig(
        family="dream" if is_qwen2 else "llada",
        vocab_size=theirs.vocab_size,
        embed_dim=theirs.hidden_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        mlp_dim=theirs.intermediate_size,
        rope_theta=theirs.rope_parameters["rope_theta"],
        norm_eps=theirs.rms_norm_eps,
        max_length=theirs.max_position_embeddings,
        eos_id=0,
        pad_id=0,
        mask_id=1,
        end_ids=(0,),
        attention=attention,
        shift=shift,
        qkv_bias=is_qwen2,
        qk_norm=is_moe,
        yarn=read_yarn(HubConfig(theirs.rope_parameters, "rope_parameters")),
        experts=experts_of(theirs) if is_moe else None,
        tied_embeddings=theirs.tie_word_embeddings,
        dtype="float32",
    )
    params = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tied_embeddings:
            continue
        pattern = next(pattern for pattern in NAMES if re.fullmatch(pattern, name))
        ours = re.sub(pattern, NAMES[pattern], name)
        params[ours] = jnp.asarray(in_our_layout(ours, weight.numpy()))
    return Denoiser(config, params)


def experts_of(theirs):
    return Experts(
        num_experts=theirs.num_experts,
        per_token=theirs.num_experts_per_tok,
        dim=theirs.moe_intermediate_size,
        dense_layers=tuple(theirs.mlp_only_layers),
    )


def in_our_layout(name, array):
    if name.endswith("w_in"):  # [E, 2F, D]
        return array.reshape(len(array), 2, -1, array.shape[-1]).transpose(0, 1, 3, 2)
    if name.endswith("w_out"):
        return array.transpose(0, 2, 1)
    return array.T if name.endswith(("kernel", "router")) else array


def reference_logits(model, tokens, attention, lengths=None):
    """[B, S, V] under an explicit additive mask [B, 1, S, S], which the eager implementation takes as it is."""
    batch, size = tokens.shape
    lengths = np.full(batch, size) if lengths is None else lengths
    visible = np.tile(np.arange(size) < lengths[:, None, None], (1, size, 1))
    if attention == "causal":
        visible &= np.tri(size, dtype=bool)
    mask = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), attention_mask=mask, use_cache=False).logits.numpy()


def random_tokens(seed, batch=2, size=13):
    return np.random.default_rng(seed).integers(2, 101, (batch, size), dtype=np.int32)


def assert_close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    architecture, sizes = MODELS[request.param]
    return reference(architecture, **sizes)


def test_reference_honours_the_mask(model):
    """Guards the other tests: transformers must not put its own causal mask over ours, and logits must not be tiny."""
    tokens = random_tokens(0)
    with torch.no_grad():
        default = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
    causal = reference_logits(model, tokens, "causal")
    bidirectional = reference_logits(model, tokens, "bidirectional")
    np.testing.assert_allclose(causal, default, rtol=0, atol=1e-6)
    assert np.abs(bidirectional - causal)[:, :-1].max() > 0.1
    assert 0.3 < bidirectional.std() < 3


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_logits(model, attention):
    tokens = random_tokens(1)
    assert_close(denoiser(model, attention, shift=False)(tokens), reference_logits(model, tokens, attention))


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_right_padded_batch(model, attention):
    """Each row equals the unpadded row alone, whatever stands in the padding."""
    tokens = random_tokens(2)
    ours = denoiser(model, attention, shift=False)(tokens, LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = reference_logits(model, tokens[row : row + 1, :length], attention)
        assert_close(ours[row, :length], alone[0])
    assert_close(ours, reference_logits(model, tokens, attention, LENGTHS))


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_shifted_family_is_aligned(model, attention):
    tokens = random_tokens(3)
    ours = denoiser(model, attention, shift=True)(tokens, LENGTHS)
    assert_close(ours[:, 1:], reference_logits(model, tokens, attention, LENGTHS)[:, :-1])


@pytest.mark.parametrize("shift", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_window_against_the_cache(model, attention, shift):
    """A window at another place in each row, against buffers that know nothing true about it, equals the full pass."""
    ours, tokens = denoiser(model, attention, shift), random_tokens(4)
    start, width = jnp.array([6, 3], jnp.int32), 4
    want = reference_logits(model, tokens, attention, LENGTHS)
    want = np.stack([want[row, at - shift : at - shift + width] for row, at in enumerate(start)])

    hidden, cache = ours.forward(tokens, LENGTHS, outputs=Span(start, width))
    assert_close(ours.logits(hidden), want)

    inside = (jnp.arange(tokens.shape[1]) >= start[:, None]) & (jnp.arange(tokens.shape[1]) < start[:, None] + width)
    stale = jax.tree.map(lambda x: jnp.where(inside[..., None, None], 9.0, x), cache)
    hidden, updated = ours.forward(tokens, LENGTHS, at=Span(start, width), kv=stale)
    assert_close(ours.logits(hidden), want)
    for mended, filled in zip(jax.tree.leaves(updated), jax.tree.leaves(cache), strict=True):
        assert_close(mended, filled)

    hidden, _ = ours.forward(tokens, LENGTHS, at=Span(start, width), kv=stale, outputs=Span(start + 1, 2))
    assert_close(ours.logits(hidden), want[:, 1:3])

    anywhere = start[:, None] + jnp.array([3, 0, 2, 1])
    hidden, updated = ours.forward(tokens, LENGTHS, at=anywhere, kv=stale)
    assert_close(ours.logits(hidden), want[:, [3, 0, 2, 1]])
    for mended, filled in zip(jax.tree.leaves(updated), jax.tree.leaves(cache), strict=True):
        assert_close(mended, filled)


def test_causal_windows_one_after_the_other(model):
    """An autoregressive verifier never needs a full pass: chunks fill empty buffers from the left."""
    ours, tokens = denoiser(model, "causal", shift=False), random_tokens(5)
    cache, lengths = ours.empty_cache(*tokens.shape), jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    logits, edges = [], [0, 5, 6, 10, 13]
    for begin, end in zip(edges, edges[1:], strict=False):
        at = jnp.full(len(tokens), begin, jnp.int32)
        hidden, cache = ours.forward(tokens, lengths, at=Span(at, end - begin), kv=cache)
        logits.append(ours.logits(hidden))
    assert_close(jnp.concatenate(logits, axis=1), reference_logits(model, tokens, "causal"))


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
SAVED = {
    "llama": ("llama", LLAMA, dict(tied=False)),
    "llama3-tied": ("llama", LLAMA, dict(tied=True, head_dim=32, rope_parameters=LLAMA3)),
    "qwen2": ("qwen2", QWEN2, dict(tied=False)),
    "qwen2-tied": ("qwen2", QWEN2, dict(tied=True)),
    "qwen3-tied": ("qwen3", QWEN3, dict(tied=True, head_dim=32)),
    "qwen3-moe": ("qwen3", QWEN3_MOE, dict(tied=False, **MOE | {"norm_topk_prob": True})),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_by_transformers_and_back(name, tmp_path):
    """What transformers saves is converted and gives its logits; what we write back, transformers loads."""
    family, architecture, sizes = SAVED[name]
    theirs = reference(architecture, kv_heads=2, **sizes)
    theirs.save_pretrained(tmp_path / "saved")
    convert.convert(family, tmp_path / "saved", tmp_path / "ours")
    tokens = random_tokens(6)
    want = reference_logits(theirs, tokens, "causal")
    assert_close(dllm_jax.load(tmp_path / "ours").denoiser(tokens)[:, 1:], want[:, :-1])

    convert.export(tmp_path / "ours", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", local_files_only=True
    )
    assert_close(reference_logits(again.eval(), tokens, "causal"), want)
