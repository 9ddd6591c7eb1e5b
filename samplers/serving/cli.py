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
from dllm_jax import DllmError
from dllm_jax.checkpoints.loading import outline
from dllm_jax.cli.command import Parser
from dllm_jax.params.quantized import dtype_label
from dllm_jax.text.tokenizer import without_special_tokens
from samplers.checks import check_length, check_number, check_whole
from samplers.cli.flags import add_model, add_sampler, command_buffers_of, model_name, read_flags
from samplers.config.registry import title
from samplers.engine.engine import Engine

KEY_VARIABLE = "DLLM_API_KEY"
LOG_LINES = 50  # per second

_ABOUT = """Serves a model with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models; also Anthropic's
/v1/messages, /v1/canvas, /v1/infill, /v1/decide, /health, /metrics, and a page at / that shows the canvas while it is
written. A request's body may set the sampler's numbers (threshold, gamma ...), with OpenAI's client in `extra_body`.
Ctrl-C finishes running answers. More is in docs/serving.md."""


def run(arguments: Sequence[str]) -> None:
    """Serves until it is interrupted.

    Raises:
        DllmError: for bad options, without the extra `serve`, and when an error stops the engine.
    """
    options = command_line().parse_args(arguments)
    try:
        from samplers.serving.scheduler import Limits
        from samplers.serving.server import Server, bind_socket, serve, url_of
    except ModuleNotFoundError as error:
        raise DllmError(f"serving needs the package {error.name}; pip install 'dllm_jax[serve]'") from None
    _check_options(options)
    keys = _read_keys(options.api_key_file)
    at = bind_socket(options.host, options.port)
    with command_buffers_of(options):
        engine = _make_engine(options)
    _set_up_log()
    if not keys and not at.getsockname()[0].startswith(("127.", "::1")):
        print(f"warning: everybody who can reach {url_of(at)} may use it; set a key by --api-key-file", file=sys.stderr)

    def on_start(server: Server) -> None:
        print(f"serving {_describe(engine)} at {url_of(at)}", flush=True)

    bounds = options.queue, options.deadline or None, options.max_forwards
    limits = Limits(*bounds, options.clamp, options.special_tokens)
    about = {"keys": keys, "most_body": options.max_body, "grace": options.grace}
    asyncio.run(serve(engine, at, limits, on_start=on_start, **about))


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
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
        help="where to listen (default: 127.0.0.1, only this machine)",
    )
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)")
    add("--slots", type=int, default=8, metavar="N", help="requests that run together (default: 8)")
    add("--prompt-length", type=int, metavar="N", help="tokens of the longest prompt (default: 512)")
    add("--no-draws", dest="draws", action="store_false", help=_DRAWS)
    add("--no-buckets", dest="buckets", action="store_false", help=_BUCKETS)
    add("--prefix-cache", type=int, metavar="MIB", help=_PREFIXES)
    add("--prefill-chunk", type=int, metavar="N", help=_CHUNK)
    add("--constraint-states", type=int, default=0, metavar="N", help=_CONSTRAINTS)
    add("--top-logprobs", type=int, default=0, metavar="K", help=_TOP)
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait; others get a 429 (default: 64)")
    deadline = "of a request, including its wait; 0 for none (default: 600)"
    add("--deadline", type=float, default=600.0, metavar="SECONDS", help=deadline)
    forwards = "that an answer may take (default: 4 per position, or as many as the sampler given here takes)"
    add("--max-forwards", type=int, metavar="N", help=forwards)
    add("--no-clamp", dest="clamp", action="store_false", help=_CLAMP)
    add("--allow-special-tokens", dest="special_tokens", action="store_true", help=_SPECIAL)
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="for running answers at shutdown (default: 30)")
    add("--max-body", type=int, default=1 << 20, metavar="BYTES", help="of a request (default: 1048576)")
    add("--api-key-file", metavar="FILE", help=f"keys of clients, one on a line; or set {KEY_VARIABLE} to one")
    add_sampler(parser)
    return parser


_BUCKETS = "run all slots in every step, and compile no programs for fewer rows and shorter prompts"
_PREFIXES = "keys and values of prompts that are kept (default: 256 where the model and sampler allow it, else 0)"
_CHUNK = "positions of a prompt that are read between two steps (default: 512 where --prefix-cache is not given)"
_CLAMP = "refuse max_tokens above --gen-length; by default they count as --gen-length"
_CONSTRAINTS = "let requests set regex and response_format, with automata of so many states (default: 0, none may)"
_TOP = "let requests ask for so many of each position's most probable tokens, at most 20 (default: 0, none may)"
_SPECIAL = "special tokens in texts of clients become their ids; by default they are text like any other"
_DRAWS = "requests may not set temperature, top-p, top-k and logit_bias, which makes steps faster"


def _check_options(options: argparse.Namespace) -> None:
    """Those that an engine does not check."""
    model_name(options)
    check_length("max_body", options.max_body)
    check_whole("queue", options.queue, 0)
    check_whole("port", options.port, 0, 65535)
    check_whole("prefix_cache", options.prefix_cache, 0)
    check_length("max_forwards", options.max_forwards, optional=True)
    check_number("deadline", options.deadline, 0.0)
    check_number("grace", options.grace, 0.0)


def _read_keys(file: str | None) -> list[str]:
    """The keys, one of which requests must have; none for no check."""
    if file is None:
        return list(filter(None, [os.environ.get(KEY_VARIABLE)]))
    try:
        keys = list(filter(None, map(str.strip, Path(file).read_text().splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise DllmError(f"the API keys could not be read from {file} ({error})") from None
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise DllmError(f"{file} must hold keys of plain characters, one on a line")
    return keys


def _make_engine(options: argparse.Namespace) -> Engine:
    """The engine that the options describe. One of an outline is made first: errors come before gigabytes are read."""
    names = ("slots", "prompt_length", "draws", "buckets", "prefill_chunk", "constraint_states", "top_logprobs")
    room: dict[str, Any] = {name: getattr(options, name) for name in names}
    room["prefix_cache"] = None if options.prefix_cache is None else options.prefix_cache << 20
    bare, sampler = read_flags(options, outline)
    tokenizer = bare.require_tokenizer()
    if not options.special_tokens:
        without_special_tokens(tokenizer)
    Engine(bare, sampler.load_verifier(outline), **room)
    load = functools.partial(dllm_jax.load, dtype=options.dtype, quantize=options.quantize)
    with Console(stderr=True).status(f"loading {bare.name}", spinner="line"):
        model, sampler = load(model_name(options)), sampler.load_verifier(load)
    return Engine(model, sampler, **room)


def _describe(engine: Engine) -> str:
    sampler = f"{title(engine.sampler)}, {dtype_label(engine.model.params)}"
    lengths = f"prompts up to {engine.prompt_length} tokens, answers up to {engine.sampler.gen_length}"
    return f"{engine.model.name} ({sampler}; {engine.slots} slots, {lengths})"


class LogRate(logging.Filter):
    """Passes so many lines per second; the next line reports how many were dropped."""

    def __init__(self, most: int = LOG_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = most, clock
        self._until, self._lines, self._dropped = 0.0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now >= self._until:
            self._until, self._lines = now + 1.0, 0
        if self._lines == self._most:
            self._dropped += 1
            return False
        self._lines += 1
        if self._dropped:
            record.msg, record.args = f"({self._dropped} lines dropped) {record.getMessage()}", ()
            self._dropped = 0
        return True


def _set_up_log() -> None:
    """Logs one line per request on the standard error, as far as the rate allows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(LogRate())
    for name, level in (("samplers.serving", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = False  # libraries add handlers to the root logger
