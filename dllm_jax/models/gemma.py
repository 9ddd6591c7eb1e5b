"""Layers of Gemma 4's text stack, as DiffusionGemma has it: once as a causal encoder, which reads prompt and finished
canvases, and once as a decoder of the canvas, which sees that and itself. Both share all parameters but a scalar.

Against `dllm_jax.models.transformer.Layer`: every part has a second norm after it, scaled in float32; layers slide a
window over the keys or see all, with other heads; values are normalized, and scores not divided by sqrt(H); experts run
with a dense network. Shape letters are those of `ModelConfig`.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from dllm_jax.config import Experts, Gemma, ModelConfig
from dllm_jax.kernels.experts import apply_experts
from dllm_jax.models.layers import MLP, Linear, RMSNorm, Rope, SelfAttention, param, unit
from dllm_jax.parallel.layout import LayoutLike
from dllm_jax.params.products import in_float32


class WideNorm(RMSNorm):
    """x / rms(x), scaled, and times a constant, in float32; *then* cast to the model's dtype."""

    def __init__(self, config: ModelConfig, dim: int, axis: str = "embed", factor: float = 1.0):
        super().__init__(config, dim, axis)
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        return (unit(x, self.eps) * (self.scale[...].astype(jnp.float32) * self.factor)).astype(self.dtype)


class UnitNorm(nnx.Module):
    """x / rms(x) in float32, cast back."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return unit(x, self.eps).astype(x.dtype)


class GemmaAttention(SelfAttention):
    """Attention with a sliding window, or to everything, where the values are the keys before their norm."""

    def __init__(self, config: ModelConfig, gemma: Gemma, index: int):
        full = index in gemma.full_layers
        kv_heads, size = config.heads_of(index)
        self.q_proj = Linear(config.embed_dim, config.num_heads * size, ("embed", "heads"))
        self.k_proj = Linear(config.embed_dim, kv_heads * size, ("embed", "kv_heads"))
        self.v_proj = None if full else Linear(config.embed_dim, kv_heads * size, ("embed", "kv_heads"))
        self.o_proj = Linear(config.num_heads * size, config.embed_dim, ("heads", "embed"))
        self.q_norm = WideNorm(config, size, "head_dim", math.sqrt(size))  # which `attention` divides by
        self.k_norm, self.v_norm = WideNorm(config, size, "head_dim"), UnitNorm(config.norm_eps)
        self.head_dim, self.clip, self.block_length = size, None, None
        self.rope = Rope(size, gemma.rope_theta, gemma.rope_pairs) if full else Rope(size, config.rope_theta)
        self.window = None if full else gemma.window


class GemmaExperts(nnx.Module):
    """Mixture of GeGLU experts, whose router has a norm of its own and each expert a scale; `w_in` and `w_out` are as
    in `dllm_jax.models.transformer.MoE`."""

    def __init__(self, config: ModelConfig, experts: Experts):
        count, dim, width = experts.num_experts, config.embed_dim, experts.dim
        self.router = param((dim, count), ("embed", None))
        self.router_scale = param((dim,), ("embed",), "ones")
        self.expert_scale = param((count,), (None,), "ones")
        self.w_in = param((count, 2, dim, width), ("expert", None, "embed", "mlp"), shared=2)
        self.w_out = param((count, width, dim), ("expert", "mlp", "embed"), shared=1)
        self.per_token, self.eps = experts.per_token, config.norm_eps

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's experts, best first: [B, T, D] -> weights [B, T, per_token] float32, and their ids; in float32
        throughout, whatever the parameters' dtype."""
        wide = lambda parameter: parameter[...].astype(jnp.float32)
        inputs = unit(x, self.eps) * wide(self.router_scale) * x.shape[-1] ** -0.5
        scores = jnp.einsum("btd,de->bte", inputs, wide(self.router), precision=jax.lax.Precision.HIGHEST)
        weights, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), self.per_token)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights * wide(self.expert_scale)[ids], ids

    def __call__(self, x: jax.Array, routed_by: jax.Array, layout: LayoutLike | None) -> jax.Array:
        """What the experts make of x, chosen by other inputs, [B, T, D] all: in the `sums` of the dtype of x."""
        weights, ids = self.route(routed_by)
        tables = self.w_in.get_value(), self.w_out.get_value()
        return apply_experts(x, ids, weights.astype(x.dtype), *tables, layout, "gelu")


class GemmaLayer(nnx.Module):
    """Attention, then a dense network next to a mixture of experts, each between two norms."""

    def __init__(self, config: ModelConfig, gemma: Gemma, index: int):
        assert config.experts is not None
        norm = lambda: WideNorm(config, config.embed_dim)
        self.attn_norm, self.attn, self.attn_post_norm = norm(), GemmaAttention(config, gemma, index), norm()
        self.mlp_norm, self.mlp, self.mlp_post_norm = norm(), MLP(config.embed_dim, config.mlp_dim, "gelu"), norm()
        self.moe_norm, self.moe, self.moe_post_norm = norm(), GemmaExperts(config, config.experts), norm()
        self.post_norm = norm()
        self.encoder_scalar, self.decoder_scalar = param((1,), (None,), "ones"), param((1,), (None,), "ones")

    def after_attention(
        self, x: jax.Array, attended: jax.Array, layout: LayoutLike | None, decoder: bool, counted: jax.Array | None
    ) -> tuple[jax.Array, None]:
        """The layer's output [B, T, D] from its input and what attention makes of it; its routing is not reported,
        `counted` must be None."""
        assert counted is None
        x = x + self.attn_post_norm(attended)
        dense = self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        x = x + self.post_norm(dense + self.moe_post_norm(self.moe(self.moe_norm(x), x, layout)))
        return in_float32(jnp.multiply, x, (self.decoder_scalar if decoder else self.encoder_scalar)[...]), None


class SelfConditioning(nnx.Module):
    """What the decoder receives of the step before: unit(x + mlp(norm(soft)))."""

    def __init__(self, config: ModelConfig):
        self.norm = WideNorm(config, config.embed_dim)
        self.mlp = MLP(config.embed_dim, config.mlp_dim, "gelu")
        self.post_norm = UnitNorm(config.norm_eps)

    def __call__(self, x: jax.Array, soft: jax.Array) -> jax.Array:
        """Embeddings of a canvas and those that the step before expected there, both [B, L, D] -> [B, L, D]."""
        return self.post_norm(x + self.mlp(self.norm(soft)).astype(x.dtype))
