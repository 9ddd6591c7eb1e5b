"""Sampling from diffusion language models: unmasking rules x cache policies in one compiled loop.

sampler = BlockSampler(Threshold(0.9), gen_length=256, block_length=32, cache=DualCache())
result = sample_jit(sampler, model.denoiser, prompt)            # or `sample` inside your own jit
"""

from samplers.apd import APD, LeftRight
from samplers.apd_loop import DraftResult, LeftToRight
from samplers.apd_make import make_apd, make_left_right
from samplers.apd_verifier import Verifier, verifier_for
from samplers.block import BlockSampler, BlockState
from samplers.caches import (
    CACHES,
    CachePolicy,
    DualCache,
    NoCache,
    PrefixCache,
    VicinityCache,
    make_cache,
)
from samplers.canvas import Canvas
from samplers.engine import Result, Sampler, sample, sample_jit, stream
from samplers.generate import Generation, generate, make_sampler
from samplers.makers import MAKERS
from samplers.noise import KeyNoise, Noise
from samplers.pipeline import PipelineSampler, PipelineState
from samplers.pipeline_make import make_pipeline
from samplers.predictions import Predictions, Sampling
from samplers.presets import PRESETS, preset
from samplers.rules import (
    EB,
    NI,
    RULES,
    Credit,
    Dream,
    Edit,
    Factor,
    Hierarchical,
    LLaDA,
    Remask,
    Rule,
    Threshold,
    TopK,
    make_rule,
)
from samplers.smoothing import Smoothing
from samplers.stopping import Stop, stop_on

__all__ = [
    "APD",
    "CACHES",
    "EB",
    "MAKERS",
    "NI",
    "PRESETS",
    "RULES",
    "BlockSampler",
    "BlockState",
    "CachePolicy",
    "Canvas",
    "Credit",
    "DraftResult",
    "Dream",
    "DualCache",
    "Edit",
    "Factor",
    "Generation",
    "Hierarchical",
    "KeyNoise",
    "LLaDA",
    "LeftRight",
    "LeftToRight",
    "NoCache",
    "Noise",
    "PipelineSampler",
    "PipelineState",
    "Predictions",
    "PrefixCache",
    "Remask",
    "Result",
    "Rule",
    "Sampler",
    "Sampling",
    "Smoothing",
    "Stop",
    "Threshold",
    "TopK",
    "Verifier",
    "VicinityCache",
    "generate",
    "make_apd",
    "make_cache",
    "make_left_right",
    "make_pipeline",
    "make_rule",
    "make_sampler",
    "preset",
    "sample",
    "sample_jit",
    "stop_on",
    "stream",
    "verifier_for",
]
