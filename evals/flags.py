"""What the commands of `python -m evals` have in common: how one is declared, and flags of models and tasks."""

import argparse
from typing import Any

from dllm_jax import DllmError
from dllm_jax.parallel.sharding import parse_mesh
from evals.models import Models
from evals.tasks import TASKS
from evals.token_counts import COUNTS


def command(commands: Any, name: str, run: Any, about: str) -> Any:
    """Declares a command that runs a function of the options; returns what adds its flags."""
    parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(command=run)
    return parser.add_argument


def add_model(add: Any) -> None:
    add("--model", metavar="DIR_OR_NAME", help="converted checkpoint, of samplers that name none by @DIR")
    add("--dtype", help="bfloat16, float16 or float32; as stored by default")
    add("--quantize", metavar="BITS", help="int8 or int4: bits of kernels; as stored by default")
    add("--mesh", metavar="AXES", help="devices to split examples and model over, such as data=8 or data=2,tensor=4")


def add_batch(add: Any) -> None:
    add("--batch-size", type=int, default=64, metavar="N", help="examples sampled together (default: 64)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampler's random numbers (default: 0)")


def add_distributed(add: Any) -> None:
    about = "share the work among processes, as SLURM and others say, or as process I of N that meet there"
    add("--distributed", nargs="?", const="", metavar="HOST:PORT,N,I", help=about)


def add_count(add: Any) -> None:
    about = f"count as a paper does, besides the library's own; repeatable: {', '.join(COUNTS)}"
    add("--count", action="append", default=[], metavar="NAME", dest="counts", help=about)


def add_task(add: Any, *, required: bool = True) -> None:
    about = f"{', '.join(TASKS)}, with options as in maze:size=5"
    add("--task", required=required, metavar="TASK", help=about)


def models_of(options: argparse.Namespace) -> Models:
    """The models of the flags, none of them loaded.

    Raises:
        DllmError: for a mesh that there is not, or a batch that does not split over it, and for one of several
            processes.
    """
    if options.mesh is not None and getattr(options, "distributed", None) is not None:
        raise DllmError("--distributed gives every process a device of its own; leave --mesh out, or run one process")
    rows = getattr(options, "batch_size", 0)  # without the flag an example is sampled alone
    mesh = None if options.mesh is None else parse_mesh(options.mesh, rows, "examples (--batch-size)")
    return Models(options.model, options.dtype, options.quantize, mesh)
