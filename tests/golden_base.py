"""What the golden families share: finding a case's files, sampling its prompt, comparing a row."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import convert
import dllm_jax
from dllm_jax.models.denoiser import Span
from samplers import Result, sample_jit
from samplers.text.prompts import bucket_length, pad_prompts
from samplers.tokens.noise import Noise
from train.trajectory import steps_of

Case = dict[str, Any]


@functools.partial(jax.jit, static_argnums=4)
def full_forward(denoiser: Any, inputs: jax.Array, lengths: jax.Array, start: jax.Array, width: int) -> Any:
    """Hidden states of `width` positions, and all keys and values."""
    return denoiser.forward(inputs, lengths, outputs=Span(start, width))


@dataclasses.dataclass(frozen=True)
class Assets:
    """Files a case refers to: next to its JSON, else in the project's own copy; models are converted once."""

    folder: Path
    own: Path
    converted: dict[Path, Any]
    out: Path

    def path(self, name: str) -> Path:
        near = self.folder / name
        return near if near.exists() else self.own / name

    def model(self, checkpoint: str) -> dllm_jax.Model:
        name = checkpoint.split("-")[0]
        family = {"lladamoe": "llada-moe", "fastdllmv2": "fast-dllm-v2"}.get(name, name)

        def make(source: Path, out: Path) -> dllm_jax.Model:
            convert.convert(family, source, out)
            return dllm_jax.load(out)

        return self.once(f"checkpoints/{checkpoint}", make)

    def once(self, name: str, make: Callable[[Path, Path], Any]) -> Any:
        """What `make` makes of a file or folder and of a new folder's name; made at the first call."""
        source = self.path(name)
        if source not in self.converted:
            self.converted[source] = make(source, self.new_folder(source.stem))
        return self.converted[source]

    def new_folder(self, name: str) -> Path:
        """The name of a folder that does not exist yet."""
        return self.out / f"{name}-{len(list(self.out.iterdir()))}"


@dataclasses.dataclass(frozen=True)
class Family:
    """The cases in a file's content, and how one of them is run.

    Attributes:
        one_of: of so many generations, nearly each a program of its own, one is run by default; which one moves, so
            that cases that come in pairs of two checkpoints give both.
        sampled: generations are sampled by `sample_rows`, which can be another loop.
    """

    cases: Callable[[dict], list[Case]]
    run: Callable[[Case, Assets], None]
    one_of: int = 1
    one_unit_of: int = 1
    sampled: bool = True

    def some(self, content: dict) -> list[Case]:
        """The cases that are run by default: of `one_of` generations one, of `one_unit_of` others one."""
        generations, units = [], []
        for case in self.cases(content):
            (generations if "prompt" in case or "prompts" in case else units).append(case)
        return _spread(generations, self.one_of) + _spread(units, self.one_unit_of)


def _spread(cases: list[Case], step: int) -> list[Case]:
    """One of `step`, each time a place further on, as what cases vary often has a period."""
    return [case for number, case in enumerate(cases) if number % step == number // step % step]


def cases_of(content: dict) -> list[Case]:
    """All lists of cases a file may have."""
    return [case for key in ("cases", "unit_cases", "relations") for case in content.get(key) or []]


def generate(case: Case, assets: Assets, sampler: Any, noise: Noise | None = None) -> Any:
    """Samples the case's prompt."""
    denoiser = assets.model(case["checkpoint"]).denoiser
    return sample_rows(denoiser, sampler, [case["prompt"]], [case["args"]["gen_length"]], noise)


def sample_rows(
    denoiser: dllm_jax.Denoiser, sampler: Any, rows: list[list[int]], gen_lengths: list[int], noise: Any = None
) -> Any:
    """Samples prompts. Prompts are padded and canvases end early, so that most cases share programs."""
    prompt, lengths = padded(rows)
    return sample_jit(sampler, denoiser, prompt, lengths, gen_lengths=jnp.asarray(gen_lengths), noise=noise)


def padded(rows: list[list[int]], least: int = 128) -> tuple[jax.Array, jax.Array]:
    """Prompts [B, P] and their lengths [B], P at least `least`."""
    return pad_prompts(rows, max(least, bucket_length(max(map(len, rows)))))


def lengths_of(args: dict) -> dict[str, int | None]:
    """Room for the generation and its block: one block is as long as the room."""
    room = max(64, bucket_length(args["gen_length"]))
    block = args.get("block_length")
    return {"gen_length": room, "block_length": None if block in (None, args["gen_length"]) else block}


def assert_row(result: Result, row: int, tokens: list[int], steps: list[list[int]], nfe: int, mask_id: int) -> None:
    written = np.asarray(result.decoded_at[row]) >= 0
    assert np.where(written, result.tokens[row], mask_id).tolist()[: len(tokens)] == tokens
    assert not written[len(tokens) :].any()
    assert int(result.nfe[row]) == nfe
    assert steps_of(result, row) == steps


def check(result: Result, case: Case) -> None:
    expected, mask_id = case["expected"], case["args"]["mask_id"]
    assert_row(result, 0, expected["tokens"], expected["steps"], expected["nfe"], mask_id)
