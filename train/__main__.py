"""The command line: `python -m train COMMAND`; those with --config train."""

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from dllm_jax.cli.command import Parser, keep_programs
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from train.curves import FORMATS, USUAL, plot_runs
from train.lora import merge_adapters
from train.multihost_stop import INTERRUPTED, Interrupted
from train.objectives import OBJECTIVES, config_of_run, read_config
from train.report import write_report
from train.settings_help import listing
from train.trainer import train, write_weights

_MISTAKE = 2  # the status of every command after an error


class _Parser(Parser):
    """Takes settings wherever they stand, which argparse does not for commands of commands."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if other := [word for word in rest if word.startswith("-") or "=" not in word or "settings" not in options]:
            self.error(f"unrecognized arguments: {' '.join(other)}")
        if rest:
            options.settings += rest
        return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its status: 0 when it worked, 2 after an error, which is printed as one sentence,
    130 after SIGINT, and 75 after SIGTERM, when the same command resumes the run."""
    for logger in ("absl", "asyncio", "gcsfs"):  # they raise what goes wrong, and log it as well
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    try:
        options = command_line().parse_args(arguments)
        keep_programs()
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            options.run(options)
    except Interrupted as reason:
        print(reason, file=sys.stderr)
        return reason.status
    except (Exception, KeyboardInterrupt) as error:
        status = _report_error(error)
        if multihost.count() > 1:
            multihost.leave(status)
        return status
    return 0


def _report_error(error: BaseException) -> int:
    """Prints why a command ended, and returns its status."""
    if isinstance(error, DllmError):
        print(f"error: {error}", file=sys.stderr)
        return _MISTAKE
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; the same command resumes from the last state", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        hint = "raise optimizer.accumulate, set compute.remat or objective.chunk, or use more devices"
        print(f"error: the device ran out of memory; {hint}", file=sys.stderr)
        return _MISTAKE
    if multihost.count() == 1:
        raise error
    traceback.print_exception(error)
    return 1


def command_line() -> argparse.ArgumentParser:
    """The options, for the command itself and for `dllm completion`."""
    parser = _Parser(prog="python -m train", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, objective in OBJECTIVES.items():
        _add_training(commands, name, objective.about)
    command = commands.add_parser("write-model", help="write the weights of a run's state as a checkpoint")
    command.set_defaults(run=_write_model)
    command.add_argument("--run", required=True, metavar="DIR", dest="folder", help="output folder of a run")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of a state that is there (default: the latest)")
    about = "the best state by checkpoint.metric"
    which.add_argument("--best", action="store_const", const="best", dest="step", help=about)
    _add_output(command)
    _add_plot(commands)
    _add_report(commands)
    command = commands.add_parser("merge-lora", help="add trained adapters to their base model")
    command.set_defaults(run=_merge)
    command.add_argument("--base", required=True, metavar="DIR_OR_NAME", help="the model they were trained on")
    command.add_argument("--adapters", required=True, metavar="DIR", help="the folder adapters/ of a run")
    _add_output(command)
    return parser


def _add_plot(commands: Any) -> None:
    command = commands.add_parser("plot", help="draw the curves of one or several runs")
    command.set_defaults(run=_plot)
    about = "output folder of a run; repeatable"
    command.add_argument("--run", required=True, action="append", metavar="DIR", dest="folders", help=about)
    command.add_argument("--out", required=True, metavar="FILE", help=f"what ends in {', '.join(FORMATS)}")
    about = f"a name in the log; repeatable (default: {', '.join(USUAL)})"
    command.add_argument("--metric", action="append", default=[], metavar="NAME", dest="metrics", help=about)


def _add_report(commands: Any) -> None:
    command = commands.add_parser("report", help="write one page about one or several runs, to send to somebody")
    command.set_defaults(run=_report)
    command.add_argument("folders", nargs="+", metavar="DIR", help="output folder of a run")
    command.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first DIR)")


def _add_training(commands: Any, name: str, text: str) -> None:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=_train, command=name)
    about = "print all settings with meanings, ranges and defaults"
    command.add_argument("--settings", action=_Listing, nargs=0, dest=argparse.SUPPRESS, help=about)
    command.add_argument("--config", required=True, metavar="FILE", help="settings in TOML, see train/configs")
    command.add_argument("settings", nargs="*", metavar="key=value", help="changes, such as optimizer.lr=3e-4")
    about = "a setting, or the data, that may differ from the run's before; repeatable, noted in the run's log"
    command.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=about)
    command.add_argument("--no-progress", action="store_true", help="no progress bar")
    cluster = command.add_argument_group("several processes, each started with the same command")
    about = "train together: alone in a cluster such as SLURM, else as process I of N with process 0 at HOST:PORT"
    cluster.add_argument("--distributed", nargs="?", const="", metavar="HOST:PORT,N,I", help=about)
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    cluster.add_argument("--processes", type=int, metavar="N", help="how many there are")
    cluster.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


class _Listing(argparse.Action):
    """Prints all settings of a command, and ends it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(listing(OBJECTIVES[parser.get_default("command")].config), end="")
        parser.exit()


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", required=True, metavar="DIR", help="folder that does not exist yet")
    command.add_argument("--overwrite", action="store_true", help="replace --out")


def _train(options: argparse.Namespace) -> None:
    _join(options)
    with multihost.fail_together():
        config = read_config(options.config, options.settings, options.command)
    outcome = train(config, progress=not options.no_progress, allow_change=options.allow_change)
    if multihost.index():
        return
    shown = " ".join(f"{name} {value:.6g}" for name, value in outcome.metrics.items())
    before = f" ({outcome.started} before)" if outcome.started else ""
    print(f"{config.out}: {outcome.step} steps{before}, {shown or 'nothing was left to do'}")
    print(f"written to {outcome.folder}")


def _join(options: argparse.Namespace) -> None:
    given = [options.coordinator, options.processes, options.process]
    if given != [None] * 3:
        if None in given or options.distributed is not None:
            need = "give all three, or --distributed, or none"
            raise DllmError(f"--coordinator, --processes and --process belong together; {need}")
        if not 0 <= options.process < options.processes:
            raise DllmError(f"--process {options.process} is not one of {options.processes} processes from 0 on")
        options.distributed = ",".join(map(str, given))
    if options.distributed is not None:
        multihost.join(options.distributed)


def _write_model(options: argparse.Namespace) -> None:
    config = config_of_run(options.folder)
    step = write_weights(config, options.out, step=options.step, overwrite=options.overwrite)
    print(f"{options.out}: the weights after step {step}")


def _plot(options: argparse.Namespace) -> None:
    drawn = plot_runs(options.folders, options.out, options.metrics)
    print(f"{options.out}: {', '.join(drawn)} of {', '.join(options.folders)}")


def _report(options: argparse.Namespace) -> None:
    print(f"{write_report(options.folders, options.out)}: {', '.join(options.folders)}")


def _merge(options: argparse.Namespace) -> None:
    merge_adapters(options.base, options.adapters, options.out, overwrite=options.overwrite)
    print(f"{options.out}: {options.base} with {options.adapters} added")


if __name__ == "__main__":
    sys.exit(main())
