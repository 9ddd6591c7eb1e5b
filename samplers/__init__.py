"""Sampling from diffusion language models: unmasking rules x cache policies in one compiled loop.

sampler = BlockSampler(Threshold(0.9), gen_length=256, block_length=32, cache=DualCache())
result = sample_jit(sampler, model.denoiser, prompt)            # or `sample` inside your own jit
"""

from samplers.caches import (
    CACHES,
    CachePolicy,
    DualCache,
    ExactCache,
    NoCache,
    PrefixCache,
    SubBlockCache,
    VicinityCache,
)
from samplers.canvas import Canvas
from samplers.command_buffers import use_command_buffers
from samplers.config.presets import PRESETS
from samplers.config.registry import LOOPS
from samplers.config.sampler_config import SamplerConfig, make_sampler, parse_sampler, parse_samplers
from samplers.constraints.automaton import constraint_for
from samplers.constraints.constraint import Constraint
from samplers.decisions.answers import Decision
from samplers.decisions.decide import decide
from samplers.engine.engine import Engine
from samplers.engine.requests import Request, Update
from samplers.generate import generate
from samplers.generation import Generation
from samplers.infill import Infilling, infill
from samplers.likelihood.scoring import Score, score, score_each
from samplers.loops.apd import APD, LeftRight
from samplers.loops.autoregressive import Autoregressive
from samplers.loops.block import BlockSampler, BlockState
from samplers.loops.causal_context import ContextBlocks, ContextState
from samplers.loops.d2f import PipelineSampler, PipelineState
from samplers.loops.left_to_right import DraftResult, LeftToRight
from samplers.loops.renoise import Renoise, RenoiseState
from samplers.loops.self_speculation import SelfSpeculation
from samplers.loops.verifier import Verifier, verifier_for
from samplers.rules import (
    EB,
    NI,
    RULES,
    Credit,
    Dream,
    Dynamic,
    Edit,
    Factor,
    FastDllmV2,
    Hierarchical,
    LLaDA,
    Remask,
    Rule,
    Threshold,
    TopK,
)
from samplers.sampler import Result, Sampler, sample, sample_jit, stream
from samplers.serialization import export
from samplers.stopping import Stop, stop_on
from samplers.text.decode import TextStream, text_of
from samplers.text.prompts import Conversation
from samplers.tokens.noise import KeyNoise, Noise
from samplers.tokens.predictions import Predictions, Sampling
from samplers.tokens.smoothing import Smoothing
from samplers.viewer import View, compare, show

__all__ = [
    "APD",
    "CACHES",
    "EB",
    "NI",
    "PRESETS",
    "RULES",
    "Autoregressive",
    "BlockSampler",
    "BlockState",
    "CachePolicy",
    "Canvas",
    "Constraint",
    "ContextBlocks",
    "Conversation",
    "ContextState",
    "Credit",
    "Decision",
    "DraftResult",
    "Dream",
    "DualCache",
    "Dynamic",
    "Edit",
    "ExactCache",
    "FastDllmV2",
    "SubBlockCache",
    "Engine",
    "Factor",
    "Generation",
    "Hierarchical",
    "Infilling",
    "KeyNoise",
    "LLaDA",
    "LOOPS",
    "LeftRight",
    "LeftToRight",
    "NoCache",
    "Noise",
    "PipelineSampler",
    "PipelineState",
    "Predictions",
    "PrefixCache",
    "Remask",
    "Renoise",
    "RenoiseState",
    "Request",
    "Result",
    "Rule",
    "Sampler",
    "SamplerConfig",
    "Sampling",
    "Score",
    "SelfSpeculation",
    "Smoothing",
    "Stop",
    "TextStream",
    "Threshold",
    "TopK",
    "Update",
    "Verifier",
    "VicinityCache",
    "View",
    "compare",
    "constraint_for",
    "decide",
    "export",
    "generate",
    "infill",
    "make_sampler",
    "parse_sampler",
    "parse_samplers",
    "sample",
    "sample_jit",
    "score",
    "score_each",
    "show",
    "stop_on",
    "stream",
    "text_of",
    "use_command_buffers",
    "verifier_for",
]
