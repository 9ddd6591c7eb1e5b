"""Tiny models and data for the tests of training."""

import copy
import dataclasses
import json
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax
from dllm_jax import DllmError
from train.batches import batch_of
from train.objectives.masked_diffusion import MaskedDiffusionConfig
from train.settings import build_settings
from train.step import Stepper

LLADA = dllm_jax.published_config("llada-8b-base").replace(
    vocab_size=24,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=32,
    rope_theta=1e4,
    eos_id=20,
    pad_id=20,
    mask_id=21,
    bos_id=22,
    end_ids=(20,),
    dtype="float32",
)
DREAM = LLADA.replace(family="dream", shift=True, qkv_bias=True, num_kv_heads=1)
SPECIAL = ("eos_id", "pad_id", "mask_id", "bos_id", "end_ids")


@dataclasses.dataclass(frozen=True)
class Reverse:
    """An endless source: a prompt of digits, and the same backwards."""

    digits: int = 5
    seed: int = 0

    def example(self, index):
        digits = np.random.default_rng([self.seed, index]).integers(0, 10, self.digits)
        return dllm_jax_example(digits, digits[::-1])


class TwoWords(Exception):
    """An error that cannot be pickled as it is."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@dataclasses.dataclass(frozen=True)
class Failing(Reverse):
    """The same up to an example that ends in some way; `seconds` are how long one takes."""

    at: int = -1
    how: str = ""
    seconds: float = 0.0

    def example(self, index):
        time.sleep(self.seconds)
        if index == self.at:
            if self.how == "refuses":
                raise DllmError("example 21 is gone; fetch it again")
            if self.how == "disk":
                raise OSError(5, "Input/output error", "local.jsonl")
            if self.how == "two words":
                raise TwoWords("no", "more")
            if self.how == "exits":
                sys.exit(0)
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().example(index)


class Locked(Reverse):
    """A source that cannot be pickled."""

    def __init__(self):
        object.__setattr__(self, "lock", threading.Lock())


def about_process(number):
    """What a function of a loader finds where it runs."""
    return number, jax.config.jax_platforms, jax.devices()[0].platform, signal.getsignal(signal.SIGINT), os.getpid()


def even(text, targets):
    """A score of answers in words: half of what a random model says is right."""
    return len(text) % 2 == 0


@dataclasses.dataclass(frozen=True)
class Slow(Reverse):
    """The same, slow enough for runs to be interrupted; its examples end at a number, in one process alone."""

    seconds: float = 0.005
    end: int = 10**9
    process: int = 1

    def example(self, index):
        time.sleep(self.seconds)
        if index >= self.end and jax.process_index() == self.process:
            raise OSError(5, "Input/output error", "local.jsonl")
        return super().example(index)


def dllm_jax_example(prompt, answer, given=None):
    from train.data import Example

    return Example(np.asarray(prompt), np.asarray(answer), given)


def model_fields(model=LLADA, published="llada-8b-base"):
    fields = dataclasses.asdict(model)
    base = dataclasses.asdict(dllm_jax.published_config(published))
    changed = {name: value for name, value in fields.items() if value != base[name]}
    return _as_toml(changed)


def _as_toml(value):
    """Tables without None, which TOML lacks, and lists."""
    if isinstance(value, dict):
        return {name: _as_toml(x) for name, x in value.items() if x is not None}
    return list(value) if isinstance(value, tuple) else value


def settings(out, **changes):
    """A complete small run as a nested table; changes are written like ``optimizer__lr=0.1``."""
    values = {
        "out": str(out),
        "steps": 6,
        "model": {"config": model_fields()},
        "data": {"source": "train_toys:Reverse", "length": 12},
        "optimizer": {"batch": 8, "warmup": 2, "lr": 1e-2},
        "checkpoint": {"every": 3},
        "log": {"every": 2, "mfu": False},
    }
    for name, value in changes.items():
        *tables, last = name.split("__")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = copy.deepcopy(value)  # later changes are of this table alone
    return values


def run_config(out, **changes) -> MaskedDiffusionConfig:
    return build_settings(MaskedDiffusionConfig, settings(out, **changes))


def write_toml(path, values):
    """TOML of a nested table: dotted keys with JSON values, which both languages write alike here."""
    lines = []

    def walk(prefix, table):
        for name, value in table.items():
            if isinstance(value, dict) and value:
                walk(f"{prefix}{name}.", value)
            else:
                lines.append(f"{prefix}{name} = {json.dumps(value)}")

    walk("", values)
    path.write_text("\n".join(lines) + "\n")
    return path


def of_lengths(folder, cache):
    """A table of settings: JSON lines of answers of 1 to 25 tokens, in buckets."""
    path = folder / "lengths.jsonl"
    if not path.exists():  # or it would be other data
        entries = ({"prompt": [i % 10], "answer": [i % 10] * (1 + i % 25)} for i in range(60))
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    options = {"source": "jsonl", "options": {"path": str(path)}, "cache": str(cache)}
    return {**options, "length": 32, "bucket": 16, "pad": False}


class Listed:
    """A finite source of examples in memory."""

    def __init__(self, examples):
        self._examples = examples

    def __len__(self):
        return len(self._examples)

    def example(self, index):
        return self._examples[index]


class Finite:
    """Twenty examples of `Reverse`."""

    def __len__(self):
        return 20

    def example(self, index):
        return Reverse().example(index)


def finite():
    return Finite()


def batch_of_rows(rows, count):
    """The first rows as one batch [count, T] on one device."""
    found = batch_of(rows, 0, (1, count), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return jax.tree.map(lambda x: x[0], found)


def pairs():
    """Twenty pairs: the better answer repeats the prompt's digit, the worse one another."""
    given = np.array([False, True, False])
    return Listed([dllm_jax_example([i % 10], [i % 10, i % 10, (i + 3) % 10], given) for i in range(20)])


def spoil_gradients(monkeypatch, *bad):
    """NaN gradients at steps of these numbers, from 1 on."""
    call, gradient = Stepper.__call__, Stepper.gradient

    def stepped(self, state, *rest):
        self.spoiled = jnp.isin(state.step + 1, jnp.asarray(bad))
        return call(self, state, *rest)

    def spoiled(self, *arguments):
        found, metrics = gradient(self, *arguments)
        return jax.tree.map(lambda x: jnp.where(self.spoiled, jnp.nan, x), found), metrics

    monkeypatch.setattr(Stepper, "__call__", stepped)
    monkeypatch.setattr(Stepper, "gradient", spoiled)


@dataclasses.dataclass(frozen=True)
class Liked:
    """An endless source of prompts of one to three digits, whose reward is the share of low token ids in the answer."""

    below: int = 12
    seed: int = 0

    def example(self, index):
        digits = np.random.default_rng([self.seed, index]).integers(0, 10, 1 + index % 3)
        return dllm_jax_example(digits, [])

    def reward(self, example, ids):
        return sum(token < self.below for token in ids) / 6


@dataclasses.dataclass(frozen=True)
class SlowLiked(Liked):
    """The same with rewards that take their time, write down which process computes them, and fail in one."""

    seconds: float = 0.0
    log: str = ""
    fails: int = -1

    def reward(self, example, ids):
        if jax.process_index() == self.fails:
            raise DllmError("the sandbox is gone")
        time.sleep(self.seconds)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{jax.process_index()}\n")
        return super().reward(example, ids)
