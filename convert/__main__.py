"""The command line: `python -m convert FAMILY | published | embedded | ni-indicator | verify | export | push`."""

import argparse
import logging
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from convert import convert, convert_adapters, embedded, export, published, push, verify
from convert.adapters import install_draft_adapter
from convert.indicator import convert_indicator, export_indicator, is_indicator, verify_indicator
from dllm_jax.cli.command import Parser
from dllm_jax.cli.interrupts import INTERRUPTED, interruptible
from dllm_jax.errors import DllmError
from dllm_jax.families import FAMILIES, PUBLISHED
from dllm_jax.models.transformer import num_params

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when it worked, 2 after a mistake, which is printed as one sentence."""
    jax.config.update(
        "jax_platforms", "cpu"
    )  # converting needs no accelerator, and must not take one from somebody else
    for logger in ("absl", "asyncio"):  # Orbax raises what goes wrong, and logs it as well
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    try:
        options = command_line().parse_args(arguments)
        with interruptible():
            options.run(options)
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
    parser = Parser(prog="python -m convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in FAMILIES:
        command = commands.add_parser(family, help=f"convert a {family} checkpoint from the hub's format")
        command.set_defaults(run=_convert, family=family)
        command.add_argument("--source", required=True, metavar="DIR_OR_ID", help="folder, or repository id on the hub")
        command.add_argument("--revision", help="branch, tag or commit of the repository")
        if FAMILIES[family].asks_block_length:
            about = "length of its blocks, where neither config.json nor its name says it"
            command.add_argument("--block-length", type=int, metavar="N", help=about)
        command.add_argument("--quantize", metavar="BITS", help="int8 or int4: quantize kernels to this many bits")
        _add_output(command)
    command = commands.add_parser("embedded", help="convert models that come with the library, to be found by name")
    command.set_defaults(run=_embedded)
    command.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(embedded.names())} (default: all)")
    command = commands.add_parser("published", help="download and convert published models, to be found by name")
    command.set_defaults(run=_published)
    command.add_argument("names", nargs="+", metavar="NAME", help=", ".join(PUBLISHED))
    command.add_argument("--quantize", metavar="BITS", help="int8 or int4: quantize kernels to this many bits")
    command.add_argument("--no-progress", action="store_true", help="no progress bar")
    command = commands.add_parser("d2f-lora", help="add published low-rank adapters (peft) to a converted model")
    command.set_defaults(run=_add_adapters)
    command.add_argument("--source", required=True, metavar="DIR_OR_ID", help="the adapters: folder or repository id")
    command.add_argument("--revision", help="branch, tag or commit of the repository")
    command.add_argument("--base", required=True, metavar="DIR_OR_NAME", help="the converted model they belong to")
    command.add_argument("--apart", action="store_true", help="keep them apart, for python -m train merge-lora")
    command.add_argument("--any-base", action="store_true", help="do not compare the base's name with theirs")
    command.add_argument("--out", required=True, metavar="DIR", help="folder that does not exist yet")
    command.add_argument("--overwrite", action="store_true", help="replace --out if it holds what this writes")
    command = commands.add_parser("draft-adapter", help="give a converted model adapters for its drafts")
    command.set_defaults(run=_install_draft_adapter)
    command.add_argument(
        "--source", required=True, metavar="DIR", help="the adapters (peft), such as a run's adapters/"
    )
    command.add_argument("--model", required=True, metavar="DIR_OR_NAME", help="the converted model, which is changed")
    command.add_argument("--overwrite", action="store_true", help="replace the adapters that it has")
    command = commands.add_parser("ni-indicator", help="convert an indicator of NI sampling")
    command.set_defaults(run=_convert_indicator)
    command.add_argument("--source", required=True, metavar="FILE", help="the published .pth file, or a .safetensors")
    _add_output(command)
    command = commands.add_parser("verify", help="compare a converted checkpoint with its source, bit by bit")
    command.set_defaults(run=_verify)
    command.add_argument("--source", required=True, metavar="DIR_OR_ID", help="what was converted")
    command.add_argument("--revision", help="branch, tag or commit of the repository")
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="what it was converted to")
    command.add_argument("--no-progress", action="store_true", help="no progress bar")
    command = commands.add_parser("export", help="write a checkpoint in the hub's format")
    command.set_defaults(run=_export)
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="a converted or trained checkpoint")
    layouts = {family.name: [layout.name for layout in family.layouts] for family in FAMILIES.values()}
    several = [f"{name}: {' or '.join(names)}" for name, names in layouts.items() if len(names) > 1]
    command.add_argument("--layout", metavar="NAME", help=f"how tensors are stacked; {'; '.join(several)}")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="such as 5GB (default) or 500MiB")
    _add_output(command)
    command = commands.add_parser("push", help="upload a checkpoint or adapters to the hub, with a model card")
    command.set_defaults(run=_push)
    command.add_argument("model", metavar="MODEL", help="folder or name of a checkpoint, or folder of adapters")
    command.add_argument("--to", required=True, metavar="USER/NAME", help="the repository, made if it does not exist")
    command.add_argument("--private", action="store_true", help="make a new repository private")
    command.add_argument("--revision", metavar="BRANCH", help="branch, made if it does not exist (default: main)")
    command.add_argument("--message", metavar="TEXT", help="of the commit")
    command.add_argument("--license", metavar="NAME", help="the hub's word for the license, such as apache-2.0")
    about = "repository of the model it was made from, where its notes do not say it"
    command.add_argument("--base-model", metavar="USER/NAME", help=about)
    command.add_argument("--card", metavar="FILE", help="a model card of your own, instead of the one that is written")
    command.add_argument("--dry-run", action="store_true", help="write the files into --out and upload nothing")
    _add_output(command, out="folder that keeps the files (default: a temporary one)")
    return parser


def _add_output(command: argparse.ArgumentParser, out: str | None = None) -> None:
    """Adds the options of what is written; `out` is the help of an --out that may be left out."""
    about = out or "folder that does not exist yet"
    command.add_argument("--out", required=out is None, metavar="DIR", help=about)
    command.add_argument("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32; as stored by default")
    command.add_argument("--overwrite", action="store_true", help="replace --out if it holds a checkpoint")
    command.add_argument("--no-progress", action="store_true", help="no progress bar")


def _convert(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    config = convert(
        options.family,
        options.source,
        options.out,
        dtype=options.dtype,
        quantize=options.quantize,
        revision=options.revision,
        block_length=getattr(options, "block_length", None),
        overwrite=options.overwrite,
        progress=not options.no_progress,
    )
    seconds = time.perf_counter() - start
    note = FAMILIES[options.family].note
    size = f"{num_params(config):,} parameters in {config.quantize or config.dtype}, {seconds:.1f} s"
    print(f"{options.out}: {size}{f'; {note}' if note else ''}")


def _embedded(options: argparse.Namespace) -> None:
    for name in options.names or embedded.names():
        print(embedded.install(name))


def _published(options: argparse.Namespace) -> None:
    for name in options.names:
        print(published.install(name, quantize=options.quantize, progress=not options.no_progress))


def _add_adapters(options: argparse.Namespace) -> None:
    found = convert_adapters(
        options.source,
        options.base,
        options.out,
        apart=options.apart,
        any_base=options.any_base,
        revision=options.revision,
        overwrite=options.overwrite,
    )
    what = "kept apart" if options.apart else f"merged into {options.base}"
    print(f"{options.out}: adapters of rank {found.rank} for {len(found.kernels)} matrices, {what}")


def _install_draft_adapter(options: argparse.Namespace) -> None:
    found = install_draft_adapter(options.source, options.model, overwrite=options.overwrite)
    print(f"{options.model}: drafts with adapters of rank {found.rank} for {len(found.kernels)} matrices")


def _convert_indicator(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    config = convert_indicator(options.source, options.out, dtype=options.dtype, overwrite=options.overwrite)
    print(f"{options.out}: an indicator of {config.num_params:,} parameters, {time.perf_counter() - start:.1f} s")


def _verify(options: argparse.Namespace) -> None:
    if is_indicator(options.checkpoint):
        count = verify_indicator(options.source, options.checkpoint)
    else:
        count = verify(options.source, options.checkpoint, revision=options.revision, progress=not options.no_progress)
    print(f"{options.checkpoint}: all {count} tensors are those of {options.source}")


def _export(options: argparse.Namespace) -> None:
    if is_indicator(options.checkpoint):
        if options.layout is not None:
            raise DllmError(f"--layout {options.layout} is for models, and {options.checkpoint} is an indicator")
        export_indicator(options.checkpoint, options.out, dtype=options.dtype, overwrite=options.overwrite)
        print(f"{options.out}: written under the published names")
        return
    export(
        options.checkpoint,
        options.out,
        dtype=options.dtype,
        layout=options.layout,
        max_shard_bytes=_parse_size(options.max_shard_size),
        overwrite=options.overwrite,
        progress=not options.no_progress,
    )
    print(f"{options.out}: written in the hub's format")


def _push(options: argparse.Namespace) -> None:
    if options.no_progress:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    pushed = push(
        options.model,
        options.to,
        out=options.out,
        dry_run=options.dry_run,
        private=options.private,
        revision=options.revision,
        message=options.message,
        license=options.license,
        base_model=options.base_model,
        card=options.card,
        dtype=options.dtype,
        overwrite=options.overwrite,
        progress=not options.no_progress,
    )
    for name, size in pushed.files.items():
        print(f"{size:>14,} bytes  {name}")
    what = f"{len(pushed.files)} files, {sum(pushed.files.values()):,} bytes"
    print(f"{options.to}: {what}, {pushed.url or f'written to {options.out}, nothing uploaded'}")


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", text.strip().upper())
    if not match or match[2] not in _UNITS:
        raise DllmError(f"--max-shard-size {text!r} is not a size; write it like 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _of_main_thread(failure: Any) -> None:
    """An unraisablehook that keeps one sentence one: on a full disk, tensorstore's threads print a trace per tensor."""
    if threading.current_thread() is threading.main_thread():
        sys.__unraisablehook__(failure)


if __name__ == "__main__":
    sys.unraisablehook = _of_main_thread
    sys.exit(main())
