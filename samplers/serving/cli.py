"""`python -m samplers serve`: the command line of the server."""

import argparse
import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.checkpoints.loading import outline
from dllm_jax.cli.command import Parser
from dllm_jax.params.quantized import told_dtype
from samplers.checks import check_length, check_number, check_whole
from samplers.cli.flags import add_model, add_sampler, said_by
from samplers.config.factory import defaults_of, make_sampler, typed, with_verifier
from samplers.config.registry import title
from samplers.engine.engine import Engine
from samplers.loops.verifier import verifier_for

KEY_VARIABLE = "DLLM_API_KEY"
LOG_LINES = 50  # per second

_ABOUT = """Serves a model as OpenAI's API does: /v1/chat/completions, /v1/completions, /v1/models; besides these
/v1/canvas, /health, /metrics, and a page at / that shows the canvas while it is written. The sampler's numbers
(threshold, gamma ...) may stand in a request's body, in `extra_body` of OpenAI's client. Ctrl-C finishes what runs;
see docs/serving.md."""


def run(arguments: Sequence[str]) -> None:
    """Serves until it is interrupted.

    Raises:
        DllmError: for bad options, without the extra `serve`, and when the engine stops by an error.
    """
    parser = command_line(arguments)
    options = parser.parse_args(arguments)
    try:
        from samplers.serving.scheduler import Limits
        from samplers.serving.server import Server, bound, serve, url_of
    except ModuleNotFoundError as error:
        raise DllmError(f"serving needs the package {error.name}; pip install 'dllm_jax[serve]'") from None
    _check(options)
    key = _key(options.api_key_file)
    at = bound(options.host, options.port)
    engine = _engine(options, parser.parse_args([]))
    _log()
    if key is None and not at.getsockname()[0].startswith(("127.", "::1")):
        print(f"warning: everybody who reaches {url_of(at)} may use it; see --api-key-file", file=sys.stderr)

    def began(server: Server) -> None:
        print(f"serving {_described(engine)} at {url_of(at)}", flush=True)

    limits = Limits(options.queue, options.deadline or None, options.max_forwards)
    about = {"key": key, "most_body": options.max_body, "grace": options.grace}
    asyncio.run(serve(engine, at, limits, began=began, **about))


def command_line(said: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`; `said` as for `flags.add_sampler`."""
    parser = Parser(
        prog="python -m samplers serve",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser)
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default: 127.0.0.1, this machine alone)",
    )
    add("--port", type=int, default=8000, metavar="N", help="0 takes any that is free (default: 8000)")
    add("--slots", type=int, default=8, metavar="N", help="requests that run together (default: 8)")
    add("--prompt-length", type=int, metavar="N", help="tokens of the longest prompt (default: 512)")
    add("--no-draws", dest="draws", action="store_false", help=_DRAWS)
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait; others get a 429 (default: 64)")
    deadline = "of a request, waiting included; 0 for none (default: 600)"
    add("--deadline", type=float, default=600.0, metavar="SECONDS", help=deadline)
    forwards = "that an answer may take (default: 4 a position, or what the sampler takes as it is said here)"
    add("--max-forwards", type=int, metavar="N", help=forwards)
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="for what runs at the end (default: 30)")
    add("--max-body", type=int, default=1 << 20, metavar="BYTES", help="of a request (default: 1048576)")
    add("--api-key-file", metavar="FILE", help=f"holds the key that requests must bring; or set {KEY_VARIABLE}")
    add_sampler(parser, said)
    return parser


_DRAWS = "no room for temperature, top-p and top-k of requests but those that are said here: steps are faster without"


def _check(options: argparse.Namespace) -> None:
    if options.model is None and "@" not in (options.sampler or ""):
        raise DllmError("no model was named; pass --model DIR_OR_NAME")
    check_length("slots", options.slots)
    check_length("prompt_length", options.prompt_length, optional=True)
    check_length("max_body", options.max_body)
    check_whole("queue", options.queue, 0)
    check_whole("port", options.port, 0, 65535)
    check_length("max_forwards", options.max_forwards, optional=True)
    check_number("deadline", options.deadline, 0.0)
    check_number("grace", options.grace, 0.0)


def _key(file: str | None) -> str | None:
    """The key that requests must bring, None for none."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"the API key could not be read from {file} ({error})") from None
    if not key or not key.isascii() or not key.isprintable():
        raise DllmError(f"{file} must hold one key of plain characters on one line")
    return key


def _engine(options: argparse.Namespace, usual: argparse.Namespace) -> Engine:
    """The engine of these options."""
    name, texts, named = said_by(options, usual)
    assert named is not None
    bare = outline(named)
    bare.require_tokenizer()
    said = typed(name, texts, under=defaults_of(bare)).options
    make_sampler(bare, name, **with_verifier(said, outline))  # mistakes come before gigabytes are read
    load = functools.partial(dllm_jax.load, dtype=options.dtype, quantize=options.quantize)
    with Console(stderr=True).status(f"loading {named}", spinner="line"):
        model = load(named)
        settings = _one_verifier(model, with_verifier(said, load))
    room = {"slots": options.slots, "prompt_length": options.prompt_length}
    return Engine(model, name, draws=options.draws, **room, **settings)


def _one_verifier(model: Model, said: dict[str, Any]) -> dict[str, Any]:
    """The options with one verifier for all requests: another would be another program."""
    found = said.get("verifier")
    return {**said, "verifier": verifier_for(model, found)} if isinstance(found, Model) else said


def _described(engine: Engine) -> str:
    sampler = f"{title(engine.sampler)}, {told_dtype(engine.model.params)}"
    room = (
        f"{engine.slots} slots, prompts up to {engine.prompt_length} tokens, answers up to {engine.sampler.gen_length}"
    )
    return f"{engine.model.name} ({sampler}; {room})"


class LogRate(logging.Filter):
    """Lets so many lines of a second through, and says in the next how many were left out."""

    def __init__(self, most: int = LOG_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = most, clock
        self._until, self._lines, self._left_out = 0.0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now >= self._until:
            self._until, self._lines = now + 1.0, 0
        if self._lines == self._most:
            self._left_out += 1
            return False
        self._lines += 1
        if self._left_out:
            record.msg, record.args = f"({self._left_out} lines left out) {record.getMessage()}", ()
            self._left_out = 0
        return True


def _log() -> None:
    """One line for each request, on the standard error, as far as the rate allows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(LogRate())
    for name, level in (("samplers.serving", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = False  # libraries put handlers of their own above
