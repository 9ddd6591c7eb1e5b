"""A model as lm-evaluation-harness takes it.

    from evals.harness.model import DllmLM
    lm_eval.simple_evaluate(DllmLM(dllm_jax.load(folder), preset), tasks=["gsm8k"])

The preset decides everything that a score depends on. World size stays 1 to the harness: devices are the engine's
business. Neither needs torch.
"""

import collections
import contextlib
import dataclasses
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.parallel.sharding import parse_mesh
from dllm_jax.params.quantized import dtype_label
from dllm_jax.text.tokenizer import encode_text, special_tokens, token_bytes
from evals import presets, stderr
from evals.distributed import ALONE, Processes
from evals.harness import forms
from evals.harness.answers import Answers, digest, settings_of
from evals.models import Models
from evals.presets import Preset
from evals.token_counts import CountedAnswer, answer_of, count_as, method_of
from samplers.checks import check_length, check_whole
from samplers.cli.report import device_of
from samplers.config.factory import CanvasSampler, defaults_of, parse_sampler
from samplers.config.registry import PLAIN, resolve
from samplers.engine.engine import MOST_STOPS
from samplers.engine.requests import Request
from samplers.engine.runner import Runner, slots_for
from samplers.likelihood.scoring import score_each
from samplers.loops.left_to_right import DraftResult
from samplers.text.prompts import check_lengths, encode_prompt

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    raise DllmError("lm-evaluation-harness is not installed; pip install 'dllm_jax[lm-eval]'") from None

SLOTS = 16
"""Prompts that are worked on together, where nothing is said."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request for text.

    Attributes:
        request: the harness's.
        key: of its answer.
        ids: of the prompt.
        until: strings that its text is cut at.
        gen_length: positions to generate.
        draws: [2] uint32, the data of its typed key.
    """

    request: Instance
    key: str
    ids: list[int]
    until: tuple[str, ...]
    gen_length: int
    draws: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A request for a likelihood: ids of the context and of what follows, the seed of the masks, and whether to find
    out what greedy decoding gives."""

    request: Instance
    key: str
    context: list[int]
    continuation: list[int]
    seed: int
    greedy: bool


@register_model("dllm_jax")
class DllmLM(LM):
    """A loaded model, asked as a preset says.

    Answers do not depend on the order of requests nor on what runs beside them: each has draws of its own, a hash of
    the seed, the document and the number of its repetition.

    Attributes:
        model, preset, seed: what runs.
        answers: what is known already.
        changes: what is otherwise than in the published setting.
    """

    def __init__(
        self,
        model: Model,
        preset: Preset,
        *,
        batch_size: int = SLOTS,
        answers: str | Path | None = None,
        seed: int = 0,
        changes: Sequence[str] = (),
        counts: Sequence[str] = (),
        processes: Processes = ALONE,
        progress: bool | None = None,
        load: Callable[[str], Model] = dllm_jax.load,
    ) -> None:
        """
        Args:
            batch_size: prompts, or masked copies of answers, that are worked on together.
            answers: folder of a file of answers; a run that was killed goes on where it was.
            counts: names of papers whose own counts of texts are told as well, see `counting.COUNTS`.
            processes: those that share the requests; each gets all answers.
            progress: a progress bar; by default where someone is watching.
            load: gives a verifier by its folder or name.

        Raises:
            DllmError: for bad numbers, a sampler that does not fit the model, and a model without a tokenizer.
        """
        super().__init__()
        check_length("batch_size", batch_size)
        check_whole("seed", seed, 0, 2**32 - 1)
        if answers is not None and model.folder is None:
            raise DllmError("answers of a model without a folder cannot be kept; leave answers out, or save the model")
        self.tokenizer = model.require_tokenizer()
        self.model, self.preset, self.seed, self.changes = model, preset, seed, tuple(changes)
        self.answers = Answers(answers, settings_of(model, preset, seed), processes.share)
        self._processes, self._counts = processes, counts
        for kind in counts:
            method_of(kind, sys.maxsize)
        self._batch_size, self._progress = batch_size, progress
        self._templated, self._told = False, set[Any]()
        self._used: dict[str, None] = {}  # keys of the answers that were asked for
        self._spec = parse_sampler(preset.sampler) if preset.sampler else None
        self._sampler = functools.cache(lambda length: self._built(length, load))
        if self._spec is not None:
            self._sampler(self._length or self._usual_length)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """From `--model_args`.

        Args:
            arg_dict: `pretrained` (folder or name), `preset` or `sampler`, and if you like `form`, `seed`, `answers`,
                `dtype`, `quantize`, `mesh`, `batch_size`; whatever else there is changes the preset.
            additional_config: the harness's `batch_size`; its device means nothing here.

        Raises:
            DllmError: for what does not fit together, and as `dllm_jax.load`.
        """
        said, more = dict(arg_dict), additional_config or {}
        folder = said.pop("pretrained", None)
        if not isinstance(folder, str):
            raise DllmError("no model was named; pass --model_args pretrained=DIR_OR_NAME,preset=NAME")
        size = said.pop("batch_size", more.get("batch_size"))
        batch_size = SLOTS if size in (None, "auto") else _whole("batch_size", size)
        mesh = said.pop("mesh", None)
        models = Models(
            dtype=said.pop("dtype", None),
            quantize=said.pop("quantize", None),
            mesh=None if mesh is None else parse_mesh(str(mesh), batch_size, "prompts at a time (batch_size)"),
        )
        own = {name: said.pop(name) for name in ("seed", "answers") if name in said}
        preset, changes = chosen(said.pop("preset", None), said.pop("sampler", None), said.pop("form", None), said)
        return cls(models.load(folder), preset, batch_size=batch_size, changes=changes, load=models.load, **own)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """As `create_from_arg_obj`, of "pretrained=DIR,preset=NAME"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # Chat ------------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without `add_generation_prompt` it ends right behind the assistant's last message.

        Raises:
            DllmError: for another form than the preset's, and as `dllm_jax.text.tokenizer.chat_text`.
        """
        self._templated = True
        return forms.rendered(self.tokenizer, self.preset, chat_history, continued=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template itself, for the harness's log."""
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Tells templates apart: part of the key of prompts that the harness keeps (`--cache_requests`), which it asks
        for when it was told to apply a template, and in place of applying it."""
        self._templated = True
        return f"{self.model.name}-{digest(self.tokenizer.chat_template)[:12]}"

    # Text ------------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts of (prompt, gen_kwargs), in order, cut at the stop strings, if the preset says so, and at the end.

        Raises:
            DllmError: for prompts of another form than the preset's, or too long, and for stop strings that are none.
        """
        if self._spec is None:
            problem = f"preset {self.preset.name} scores likelihoods, and {_name_of(requests)} asks for texts"
            raise DllmError(f"{problem}; choose one that generates, or a sampler")
        forms.check_templated(self.preset, self._templated)
        asked = [self._asked(request, repeat) for request, repeat in zip(requests, _repeats(requests), strict=True)]
        self._tell(asked)
        for kind in self._counts:
            method_of(kind, len({one.key for one in asked}))
        by_length: dict[int, list[_Asked]] = {}
        for one in asked:
            by_length.setdefault(one.gen_length, []).append(one)
        for length, group in by_length.items():
            check_lengths(self.model, self._sampler(length), [one.ids for one in group])
        with self._shared([one.key for one in asked], "prompt", disable_tqdm) as (mine, bar):
            for length, group in by_length.items():
                for one in self._run(self._sampler(length), group, mine):
                    self.cache_hook.add_partial("generate_until", one.request.args, self.answers[one.key]["text"])
                    bar.update()
        return [self.answers[one.key]["text"] for one in asked]

    def _asked(self, request: Instance, repeat: int) -> _Asked:
        context, options, *more = request.args
        if more:
            raise DllmError(f"{_name_of([request])} asks about images or sound; only text is understood")
        until = forms.strings_of(options.get("until")) if self.preset.until else ()
        said = next((options[name] for name in _LENGTHS if options.get(name) is not None), None)
        length = self._length or (self._usual_length if said is None else _whole("max_gen_toks", said))
        check_length("max_gen_toks", length)
        text = forms.prompt_text(self.tokenizer, self.preset, context)
        ids = self._cut_left(encode_text(self.tokenizer, text), length)
        ids = encode_prompt(self.model, ids or self._beginning)
        draws = digest(self.seed, request.doc, repeat)
        return _Asked(request, digest(ids, until, length, draws), ids, until, length, _key_data(draws))

    def _run(self, sampler: CanvasSampler, group: Sequence[_Asked], mine: Collection[str]) -> Iterator[_Asked]:
        """Answers those of these keys that are not known yet; as many slots and as much room as if nothing were, so
        that a run that goes on runs the same program."""
        left = list({one.key: one for one in group if one.key in mine and one.key not in self.answers}.values())
        early = {until: self._early(until) for until in {one.until for one in group}}
        slots = slots_for(self.model, self._processes.most(len(group)), self._batch_size)
        runner = Runner(self.model, sampler, slots)
        made = (Request(one.ids, one.gen_length, one.draws, stop=early[one.until]) for one in left)
        before = 0.0
        for one, request in zip(left, runner.run(made, longest=max(len(one.ids) for one in group)), strict=True):
            self.answers.add(one.key, self._told_of(one, request, runner.stats.seconds - before, slots))
            before = runner.stats.seconds
            yield one

    def _told_of(self, one: _Asked, request: Request, wall: float, slots: int) -> dict[str, Any]:
        """An answer's line, with all that somebody may count."""
        result = request.result
        assert result is not None
        text, tokens = forms.cut_answer(self.tokenizer, result.tokens[0, : int(result.lengths[0])].tolist(), one.until)
        return {
            "task": one.request.task_name,
            "doc_id": one.request.doc_id,
            "text": text,
            "tokens": tokens,
            "nfe": int(result.nfe[0]),
            "full_forwards": int(result.full_forwards[0]),
            "verifier_forwards": int(result.verifier_forwards[0]) if isinstance(result, DraftResult) else 0,
            "committed": int((result.decoded_at[0] >= 0).sum()),
            "seconds": request.seconds,
            "wall": wall,
            "slots": slots,
            "until": one.until,
            "prompt_ids": one.ids,
            "canvas_ids": result.tokens[0].tolist(),
        }

    def _early(self, until: tuple[str, ...]) -> tuple[str | int, ...]:
        """Those of some stop strings that end a row at once. The text is cut at all of them in any case: what is
        written behind one costs forwards alone."""
        names = special_tokens(self.tokenizer)
        known = [names.get(item, item) for item in until]
        return tuple(item for item in known if isinstance(item, int) or self._finds_strings)[:MOST_STOPS]

    @functools.cached_property
    def _finds_strings(self) -> bool:
        """Whether strings can be found in this vocabulary while a row runs."""
        try:
            return bool(token_bytes(self.tokenizer, self.model.config.vocab_size))
        except DllmError:
            return False

    def _built(self, length: int, load: Callable[[str], Model]) -> CanvasSampler:
        assert self._spec is not None
        options = {**self._spec.options, "gen_length": length}
        return dataclasses.replace(self._spec, options=options).build(self.model, load=load)

    @functools.cached_property
    def _length(self) -> int | None:
        """What the preset says, or the sampler's published setting that it names."""
        assert self._spec is not None
        found: int | None = resolve(self._spec.name, self._spec.options, PLAIN).options.get("gen_length")
        return found

    @functools.cached_property
    def _usual_length(self) -> int:
        return int(defaults_of(self.model).options["gen_length"])

    def _tell(self, asked: Sequence[_Asked]) -> None:
        """Warns, once, of what tasks say otherwise than the preset."""
        assert self._spec is not None
        ours: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0} | self._spec.settings
        ours |= {} if self._length is None else dict.fromkeys(_LENGTHS, self._length)
        ours["do_sample"] = bool(ours["temperature"])
        heard = {"until", *(_LENGTHS if self._length is None else ())}
        for task, name, value in {(one.request.task_name, *item) for one in asked for item in _plain(one.request)}:
            if name in heard or ours.get(name) == value or (task, name) in self._told:
                continue
            self._told.add((task, name))
            told = f"{name}={value} of task {task} has no effect"
            warnings.warn(f"{told}; the preset says {ours.get(name)}", stacklevel=3)

    # Likelihood ------------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of (context, continuation), in order.

        All continuations of a document are seen under the same masks. The second is looked for only where a document
        has one continuation, since of several nothing reads it, and is False elsewhere.

        Raises:
            DllmError: for prompts of another form than the preset's, empty continuations, and those that are too long.
        """
        forms.check_templated(self.preset, self._templated)
        asked = collections.Counter(_document(request) for request in requests)
        pairs = [self._pair(request, asked[_document(request)] == 1) for request in requests]
        with self._shared([pair.key for pair in pairs], "pair", disable_tqdm) as (mine, bar):
            left = {pair.key: pair for pair in pairs if pair.key in mine and pair.key not in self.answers}.values()
            for greedy in (False, True):
                for _ in self._scored([pair for pair in left if pair.greedy == greedy], greedy):
                    bar.update()
        found = [self.answers[pair.key] for pair in pairs]
        return [(line["log_likelihood"], line["is_greedy"]) for line in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Not there.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{_name_of(requests)} asks for the likelihood of whole documents, for which no estimator of masked "
            "diffusion models was published; choose tasks that generate or compare answers"
        )

    def _pair(self, request: Instance, greedy: bool) -> _Pair:
        before, after = request.args[:2]
        context, continuation = forms.pair_ids(self.tokenizer, self.preset, before, after)
        if not continuation:
            raise DllmError(f"{_name_of([request])} has the continuation {after!r}, which adds no token to its context")
        ends = self.preset.estimator == "dream"  # which sees an end behind the continuation
        context = self._cut_left(context, len(continuation) + ends) or self._beginning
        seed = int(digest(self.seed, request.doc)[:8], 16)
        return _Pair(request, digest(context, continuation, seed, greedy), context, continuation, seed, greedy)

    def _scored(self, pairs: Sequence[_Pair], greedy: bool) -> Iterator[_Pair]:
        preset = self.preset
        numbers: dict[str, Any] = {name: getattr(preset, name) for name in ("samples", "mc_batch", "guidance")}
        found = score_each(
            self.model,
            [(pair.context, pair.continuation) for pair in pairs],
            seeds=[pair.seed for pair in pairs],
            **numbers,
            estimator=preset.estimator,
            greedy=greedy,
            batch_size=self._batch_size,
            progress=False,
        )
        for index, one in found:
            request = pairs[index].request
            told = {"task": request.task_name, "doc_id": request.doc_id, "choice": request.idx}
            self.answers.add(pairs[index].key, told | vars(one))
            self.cache_hook.add_partial("loglikelihood", request.args, (one.log_likelihood, one.is_greedy))
            yield pairs[index]

    # What both need --------------------------------------------------------------------------------------------------

    @property
    def _beginning(self) -> list[int]:
        """What stands for an empty prompt."""
        config = self.model.config
        return [config.eos_id if config.bos_id is None else config.bos_id]

    def _cut_left(self, ids: list[int], behind: int) -> list[int]:
        """The last of a prompt's tokens, as many as the preset, or the context, has room for."""
        room = self.model.config.max_length - behind
        limit = room if self.preset.max_prompt is None else min(self.preset.max_prompt, room)
        if len(ids) > limit and limit > 0 and "cut" not in self._told:
            self._told.add("cut")
            told = f"prompts of more than {limit} tokens, such as one of {len(ids)}, lose their beginning"
            warnings.warn(told, stacklevel=4)
        return ids[-limit:] if limit > 0 else ids

    @contextlib.contextmanager
    def _shared(self, keys: Sequence[str], unit: str, hide: bool) -> "Iterator[tuple[Collection[str], tqdm[Any]]]":
        """Opens the file of answers; gives the keys that are this process's to answer, and their progress bar; and
        then all processes know the answers to all."""
        wanted = list(dict.fromkeys(keys))
        mine = dict.fromkeys(self._processes.mine(wanted))
        hide_it = hide or self._progress is False or not self._processes.first
        with self.answers.opened():
            about: dict[str, Any] = {"desc": self.preset.name, "unit": unit}
            about |= {"disable": hide_it or (None if self._progress is None else False)}
            with tqdm(total=len(mine), initial=sum(key in self.answers for key in mine), **about) as bar:
                yield mine, bar
        for lines in self._processes.gather([self.answers[key] for key in mine]):
            self.answers.learn(lines)
        self._used |= dict.fromkeys(wanted)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Takes the hook of `--use_cache`, whose keys say nothing of model and preset.

        Raises:
            DllmError: unless the file's name does.
        """
        where = getattr(cache_hook.dbdict, "filename", None)
        if where is not None and self.identity not in where:
            advice = f"put {self.identity} into its name, or use answers=DIR, which knows them"
            raise DllmError(f"the harness's cache {where} tells neither models nor presets apart; {advice}")
        super().set_cache_hook(cache_hook)

    @property
    def identity(self) -> str:
        """12 hexadecimal digits of preset, model and seed."""
        return digest(self.answers.settings)[:12]

    def counts(self) -> dict[str, Any]:
        """Of all texts so far, those of earlier runs too: how many, `nfe` (mean forwards, with its standard error),
        `tokens` (mean, before the end or stop string), tokens per forward and, by the time of sampling without
        compilation, of several processes the slowest one's, per second; what the papers that were asked for count
        (`compat_count`). Of likelihoods the forwards."""
        lines = [self.answers[key] for key in self._used]
        texts, forwards = [line for line in lines if "text" in line], [x["forwards"] for x in lines if "forwards" in x]
        told: dict[str, Any] = {"likelihoods": len(forwards), "forwards": sum(forwards)} if forwards else {}
        if not texts:
            return told
        nfe, tokens = [line["nfe"] for line in texts], sum(line["tokens"] for line in texts)
        seconds = _slowest(texts)
        return told | {
            "texts": len(texts),
            "nfe": float(np.mean(nfe)),
            "nfe_stderr": stderr.of_mean(nfe),
            "full_forwards": float(np.mean([line["full_forwards"] for line in texts])),
            "verifier_forwards": float(np.mean([line["verifier_forwards"] for line in texts])),
            "tokens": tokens / len(texts),
            "tokens_per_forward": tokens / max(sum(nfe), 1),
            "committed_per_forward": sum(line["committed"] for line in texts) / max(sum(nfe), 1),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "seconds": seconds,
            "compat_count": count_as(self._counts, self.model, list(map(self._counted_answer, texts)), seconds),
        }

    def _counted_answer(self, line: Mapping[str, Any]) -> CountedAnswer:
        numbers = {name: line[name] for name in ("tokens", "nfe", "committed", "prompt_ids")}
        alone = line["seconds"] if line["slots"] == 1 else None
        return answer_of(self.model, line["canvas_ids"], line["until"], seconds=alone, **numbers)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness adds to its results."""
        about = {
            **self.answers.settings,
            "form": self.preset.form,
            "sampler": self.preset.sampler,
            "changes": list(self.changes),
            "device": device_of(self.model),
            "commit": _commit(),
            "counts": self.counts(),
        }
        return {"model_name": self.model.name, "model_dtype": dtype_label(self.model.params), "dllm_jax": about}


def chosen(
    preset: str | None, sampler: str | None, form: str | None, changes: Mapping[str, Any]
) -> tuple[Preset, list[str]]:
    """The preset of a name, or a setting of one's own, and what was changed in it.

    Args:
        sampler: as it is written, where there is no preset; without it likelihoods are scored alone.
        form: of prompts; "raw" for a setting of one's own if nothing is said.
        changes: fields of the preset, or options of its sampler.

    Raises:
        DllmError: for both a preset and a sampler, and as `evals.presets.find` and `modified`.
    """
    if preset is not None and sampler is not None:
        raise DllmError("pass a preset or a sampler, not both; a preset's is changed by its options")
    if preset is not None:
        return presets.modified(presets.find(preset), **changes, **({} if form is None else {"form": form}))
    own: dict[str, Any] = {"name": "own", "model": "", "task": "", "shots": None, "form": form or "raw"}
    own |= {"kind": "likelihood"} if sampler is None else {"sampler": str(parse_sampler(sampler))}
    return presets.modified(Preset(**own), **changes)[0], []


def _whole(what: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise DllmError(f"{what} is {value!r}; it must be a whole number") from None


def _key_data(draws: str) -> np.ndarray:
    """[2] uint32 of hexadecimal digits."""
    return np.asarray([int(draws[:8], 16), int(draws[8:16], 16)], np.uint32)


def _repeats(requests: Sequence[Instance]) -> list[int]:
    """Which repetition each request is: the harness sends the same object as often as it wants answers."""
    seen = collections.Counter[int]()
    found = []
    for request in requests:
        found.append(seen[id(request)])
        seen[id(request)] += 1
    return found


def _slowest(lines: Sequence[Mapping[str, Any]]) -> float:
    """The seconds of answers, by each number of processes those of the one that took longest."""
    spent = collections.Counter[tuple[int, int]]()
    for line in lines:
        process, processes = line["share"]
        spent[processes, process] += line["wall"]
    return sum(max(spent[key] for key in spent if key[0] == number) for number in {number for number, _ in spent})


def _document(request: Instance) -> tuple[Any, ...]:
    return request.task_name, request.doc_id, digest(request.doc)


def _plain(request: Instance) -> list[tuple[str, Any]]:
    """The numbers and words among a request's options."""
    return [(name, value) for name, value in request.args[1].items() if isinstance(value, (int, float, str))]


def _name_of(requests: Sequence[Instance]) -> str:
    """The first one's task."""
    return f"task {requests[0].task_name}" if requests else "a task"


@functools.cache
def _commit() -> str | None:
    """Of the library's checkout; None where it is no checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return found.stdout.strip() or None
