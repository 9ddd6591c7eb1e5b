"""Verifiable tasks, scoring and Pareto reports for diffusion language models.

    import dllm_jax, evals

    report = evals.run(dllm_jax.load(folder), "word-problems", "eb:gamma=0.1,cache=dual,block_length=16", n=500)
    report.accuracy, report.nfe, report.tokens_per_forward

Tasks generate their examples (`evals.make_task("maze:size=5").example("train", 0)`) and verify answers; a problem
belongs to one split by its content, so that what accuracy is measured on was never trained on.
"""

from evals.aup_metric import aup
from evals.decomposition import Decomposition, decompose
from evals.runner import Report, run
from evals.sampler import SamplerConfig, parse_sampler, parse_samplers
from evals.sweeps import Sweep, sweep
from evals.tasks import SPLITS, TASKS, Example, Source, Task, Verdict, make_task
from samplers.engine.runner import Engines

__all__ = [
    "Decomposition",
    "Engines",
    "SPLITS",
    "TASKS",
    "Example",
    "Report",
    "SamplerConfig",
    "Source",
    "Sweep",
    "Task",
    "Verdict",
    "aup",
    "decompose",
    "make_task",
    "parse_sampler",
    "parse_samplers",
    "run",
    "sweep",
]
