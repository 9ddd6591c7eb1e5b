"""Operations with several implementations: `attention`, `experts`. Each has a reference, which is the specification,
XLA's own operations, which run everywhere, and kernels; `dispatch` decides which a program takes."""

from dllm_jax.kernels.attention import ATTENTION, CAUSAL, IN_BLOCKS
from dllm_jax.kernels.experts import EXPERTS

OPERATIONS = (ATTENTION, CAUSAL, IN_BLOCKS, EXPERTS)
