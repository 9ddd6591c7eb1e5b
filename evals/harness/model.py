"""A loaded model for lm-evaluation-harness.

    from evals.harness.model import DllmLM
    lm_eval.simple_evaluate(DllmLM(dllm_jax.load(folder), preset), tasks=["gsm8k"])

The preset decides everything that a score depends on. For the harness the world size is 1, because the engine divides
the work over devices. Neither needs torch.
"""

import collections
import contextlib
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.parallel.sharding import parse_mesh
from dllm_jax.params.quantized import dtype_label
from dllm_jax.text.tokenizer import encode_text, special_tokens, token_bytes
from evals import presets
from evals.distributed import ALONE, Processes
from evals.harness import forms
from evals.harness.answers import AnswerFile, digest, settings_of
from evals.harness.requests import (
    LENGTHS,
    PairRequest,
    TextRequest,
    document_of,
    key_data_of,
    length_of,
    number_repeats,
    slowest_seconds,
    task_of,
    whole_number,
)
from evals.models import Models
from evals.presets import Preset
from evals.token_counts import CountedAnswer, answer_of, complete_at, count_as, forwards_of, method_of, speed_of
from samplers.checks import check_length, check_whole
from samplers.cli.report import device_of
from samplers.config.factory import CanvasSampler
from samplers.config.sampler_config import EVALUATION_DEFAULTS, defaults_of, parse_sampler
from samplers.engine.engine import MOST_STOPS
from samplers.engine.requests import Request
from samplers.engine.runner import Runner, slots_for
from samplers.likelihood.scoring import score_each
from samplers.text.prompts import check_lengths, encode_prompt

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    raise DllmError("lm-evaluation-harness is not installed; pip install 'dllm_jax[lm-eval]'") from None

SLOTS = 16
"""Prompts that are sampled together by default."""


@register_model("dllm_jax")
class DllmLM(LM):
    """A loaded model that answers as a preset says.

    Answers depend neither on the order of requests nor on the batch: each has its own random numbers, a hash of the
    seed, the document and the number of its repetition.

    Attributes:
        model, preset, seed: what runs.
        answers: those that are known.
        changes: how the preset differs from the published setting.
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
            batch_size: prompts, or masked copies of answers, that run together.
            answers: folder of a file of answers, from which a killed run resumes.
            counts: names of papers whose counts of texts are added, see `evals.token_counts.COUNTS`.
            processes: those that share the requests; each gets all answers.
            progress: whether to show a progress bar; by default in a terminal.
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
        self.answers = AnswerFile(answers, settings_of(model, preset, seed), processes)
        self._processes, self._counts = processes, counts
        for kind in counts:
            method_of(kind, sys.maxsize)
        self._batch_size, self._progress = batch_size, progress
        self._templated, self._warned = False, set[Any]()
        self._used: dict[str, None] = {}  # keys of the answers that were asked for
        self._spec = parse_sampler(preset.sampler) if preset.sampler else None
        self._sampler = functools.cache(lambda length: self._build_sampler(length, load))
        if self._spec is not None:
            self._sampler(self._length or self._usual_length)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """From `--model_args`.

        Args:
            arg_dict: `pretrained` (folder or name), `preset` or `sampler`, and optionally `form`, `seed`, `answers`,
                `dtype`, `quantize`, `mesh`, `batch_size`; anything else changes the preset.
            additional_config: the harness's `batch_size`; its device is ignored.

        Raises:
            DllmError: for arguments that contradict each other, and as `dllm_jax.load`.
        """
        given, more = dict(arg_dict), additional_config or {}
        folder = given.pop("pretrained", None)
        if not isinstance(folder, str):
            raise DllmError("no model was named; pass --model_args pretrained=DIR_OR_NAME,preset=NAME")
        size = given.pop("batch_size", more.get("batch_size"))
        batch_size = SLOTS if size in (None, "auto") else whole_number("batch_size", size)
        mesh = given.pop("mesh", None)
        models = Models(
            dtype=given.pop("dtype", None),
            quantize=given.pop("quantize", None),
            mesh=None if mesh is None else parse_mesh(str(mesh), batch_size, "prompts at a time (batch_size)"),
        )
        own = {name: given.pop(name) for name in ("seed", "answers") if name in given}
        name, sampler, form = (given.pop(key, None) for key in ("preset", "sampler", "form"))
        preset, changes = presets.select(name, sampler, form, given)
        return cls(models.load(folder), preset, batch_size=batch_size, changes=changes, load=models.load, **own)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """As `create_from_arg_obj`, of "pretrained=DIR,preset=NAME"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # Chat ------------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without `add_generation_prompt` it ends right after the assistant's last message.

        Raises:
            DllmError: for another form than the preset's, and as `dllm_jax.text.tokenizer.chat_text`.
        """
        self._templated = True
        return forms.render_chat(self.tokenizer, self.preset, chat_history, continued=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template itself, for the harness's log."""
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Names the template in the key of the harness's stored prompts (`--cache_requests`). The harness reads it only
        if it applies a template, or instead of applying it."""
        self._templated = True
        return f"{self.model.name}-{digest(self.tokenizer.chat_template)[:12]}"

    # Text ------------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts of (prompt, gen_kwargs), in order, cut at the stop strings, if the preset says so, and at the end.

        Raises:
            DllmError: for prompts of another form than the preset's, or too long, and for stop strings that are none.
        """
        if self._spec is None:
            problem = f"preset {self.preset.name} scores likelihoods, and {task_of(requests)} asks for texts"
            raise DllmError(f"{problem}; choose one that generates, or a sampler")
        forms.check_templated(self.preset, self._templated)
        pairs = zip(requests, number_repeats(requests), strict=True)
        wanted = [self._text_request(request, repeat) for request, repeat in pairs]
        self._warn_ignored(wanted)
        for kind in self._counts:
            method_of(kind, len({one.key for one in wanted}))
        by_length: dict[int, list[TextRequest]] = {}
        for one in wanted:
            by_length.setdefault(one.gen_length, []).append(one)
        for length, group in by_length.items():
            check_lengths(self.model, self._sampler(length), [one.ids for one in group])
        with self._open_answers([one.key for one in wanted], "prompt", disable_tqdm) as (mine, bar):
            for length, group in by_length.items():
                for one in self._generate(self._sampler(length), group, mine):
                    self.cache_hook.add_partial("generate_until", one.instance.args, self.answers[one.key]["text"])
                    bar.update()
        return [self.answers[one.key]["text"] for one in wanted]

    def _text_request(self, instance: Instance, repeat: int) -> TextRequest:
        context, options, *more = instance.args
        if more:
            raise DllmError(f"{task_of([instance])} asks about images or sound; only text is understood")
        until = forms.strings_of(options.get("until")) if self.preset.until else ()
        length = self._length or length_of(options) or self._usual_length
        check_length("max_gen_toks", length)
        text = forms.prompt_text(self.tokenizer, self.preset, context)
        ids = self._cut_left(encode_text(self.tokenizer, text), length)
        ids = encode_prompt(self.model, ids or self._beginning)
        draws = digest(self.seed, instance.doc, repeat)
        return TextRequest(instance, digest(ids, until, length, draws), ids, until, length, key_data_of(draws))

    def _generate(
        self, sampler: CanvasSampler, group: Sequence[TextRequest], mine: Collection[str]
    ) -> Iterator[TextRequest]:
        """Answers those of these keys that are not known yet. Slots and room are for the whole group, so that a resumed
        run has the same program."""
        left = list({one.key: one for one in group if one.key in mine and one.key not in self.answers}.values())
        early = {until: self._early_stops(until) for until in {one.until for one in group}}
        slots = slots_for(self.model, self._processes.most(len(group)), self._batch_size)
        runner = Runner(self.model, sampler, slots)
        made = (Request(one.ids, one.gen_length, one.draws, stop=early[one.until]) for one in left)
        before = 0.0
        for one, request in zip(left, runner.run(made, longest=max(len(one.ids) for one in group)), strict=True):
            self.answers.add(one.key, self._line_of(one, request, runner.stats.seconds - before, slots))
            before = runner.stats.seconds
            yield one

    def _line_of(self, one: TextRequest, request: Request, wall: float, slots: int) -> dict[str, Any]:
        """An answer's line, with everything that is counted."""
        result = request.result
        assert result is not None
        text, tokens = forms.cut_answer(self.tokenizer, result.tokens[0, : int(result.lengths[0])].tolist(), one.until)
        return {
            "task": one.instance.task_name,
            "doc_id": one.instance.doc_id,
            "text": text,
            "tokens": tokens,
            **forwards_of(result),
            "complete_at": complete_at(result, tokens, self.model, one.until),
            "seconds": request.seconds,
            "wall": wall,
            "slots": slots,
            "until": one.until,
            "prompt_ids": one.ids,
            "canvas_ids": result.tokens[0].tolist(),
        }

    def _early_stops(self, until: tuple[str, ...]) -> tuple[str | int, ...]:
        """The stop strings that end a row at once. The text is cut at all of them; what is written after another one
        costs forwards only."""
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

    def _build_sampler(self, length: int, load: Callable[[str], Model]) -> CanvasSampler:
        assert self._spec is not None
        return self._spec.with_options(gen_length=length).load_verifier(load).build(self.model)

    @functools.cached_property
    def _length(self) -> int | None:
        """The preset's length, or that of the published setting that its sampler names; None for neither."""
        assert self._spec is not None
        found: int | None = self._spec.over(EVALUATION_DEFAULTS).options.get("gen_length")
        return found

    @functools.cached_property
    def _usual_length(self) -> int:
        return int(defaults_of(self.model).options["gen_length"])

    def _warn_ignored(self, wanted: Sequence[TextRequest]) -> None:
        """Warns, once each, of settings of tasks that the preset replaces."""
        assert self._spec is not None
        ours: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0} | self._spec.settings
        ours |= {} if self._length is None else dict.fromkeys(LENGTHS, self._length)
        ours["do_sample"] = bool(ours["temperature"])
        used = {"until", *(LENGTHS if self._length is None else ())}
        for task, name, value in {(one.instance.task_name, *item) for one in wanted for item in one.options}:
            if name in used or ours.get(name) == value or (task, name) in self._warned:
                continue
            self._warned.add((task, name))
            ignored = f"{name}={value} of task {task} has no effect"
            warnings.warn(f"{ignored}; the preset says {ours.get(name)}", stacklevel=3)

    # Likelihood ------------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of (context, continuation), in order.

        All continuations of a document have the same masks. Greedy decoding runs only if a document has one
        continuation, because nothing reads the second value of several, which is False.

        Raises:
            DllmError: for prompts of another form than the preset's, empty continuations, and those that are too long.
        """
        forms.check_templated(self.preset, self._templated)
        continuations = collections.Counter(map(document_of, requests))
        pairs = [self._pair_request(one, greedy=continuations[document_of(one)] == 1) for one in requests]
        with self._open_answers([pair.key for pair in pairs], "pair", disable_tqdm) as (mine, bar):
            left = {pair.key: pair for pair in pairs if pair.key in mine and pair.key not in self.answers}.values()
            for greedy in (False, True):
                for _ in self._score([pair for pair in left if pair.greedy == greedy], greedy):
                    bar.update()
        found = [self.answers[pair.key] for pair in pairs]
        return [(line["log_likelihood"], line["is_greedy"]) for line in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{task_of(requests)} asks for the likelihood of whole documents, for which no estimator of masked "
            "diffusion models was published; choose tasks that generate or compare answers"
        )

    def _pair_request(self, instance: Instance, *, greedy: bool) -> PairRequest:
        before, after = instance.args[:2]
        context, continuation = forms.pair_ids(self.tokenizer, self.preset, before, after)
        if not continuation:
            raise DllmError(f"{task_of([instance])} has the continuation {after!r}, which adds no token to its context")
        ends = self.preset.estimator == "dream"  # which adds an end token after the continuation
        context = self._cut_left(context, len(continuation) + ends) or self._beginning
        seed = int(digest(self.seed, instance.doc)[:8], 16)
        return PairRequest(instance, digest(context, continuation, seed, greedy), context, continuation, seed, greedy)

    def _score(self, pairs: Sequence[PairRequest], greedy: bool) -> Iterator[PairRequest]:
        preset = self.preset
        numbers: dict[str, Any] = {name: getattr(preset, name) for name in ("samples", "mc_batch", "guidance")}
        scores = score_each(
            self.model,
            [(pair.context, pair.continuation) for pair in pairs],
            seeds=[pair.seed for pair in pairs],
            **numbers,
            estimator=preset.estimator,
            greedy=greedy,
            batch_size=self._batch_size,
            progress=False,
        )
        for index, score in scores:
            instance = pairs[index].instance
            about = {"task": instance.task_name, "doc_id": instance.doc_id, "choice": instance.idx}
            self.answers.add(pairs[index].key, about | vars(score))
            self.cache_hook.add_partial("loglikelihood", instance.args, (score.log_likelihood, score.is_greedy))
            yield pairs[index]

    # What both need --------------------------------------------------------------------------------------------------

    @property
    def _beginning(self) -> list[int]:
        """What stands for an empty prompt."""
        config = self.model.config
        return [config.eos_id if config.bos_id is None else config.bos_id]

    def _cut_left(self, ids: list[int], answer: int) -> list[int]:
        """The last of a prompt's tokens, as many as the preset, or the context before so many of the answer, allows."""
        room = self.model.config.max_length - answer
        limit = room if self.preset.max_prompt is None else min(self.preset.max_prompt, room)
        if len(ids) > limit and limit > 0 and "cut" not in self._warned:
            self._warned.add("cut")
            lost = f"prompts of more than {limit} tokens, such as one of {len(ids)}, lose their beginning"
            warnings.warn(lost, stacklevel=4)
        return ids[-limit:] if limit > 0 else ids

    @contextlib.contextmanager
    def _open_answers(
        self, keys: Sequence[str], unit: str, hide: bool
    ) -> "Iterator[tuple[Collection[str], tqdm[Any]]]":
        """Opens the file of answers. Yields the keys that this process answers, and their progress bar; afterwards all
        processes know all answers."""
        wanted = list(dict.fromkeys(keys))
        mine = dict.fromkeys(self._processes.mine(wanted))
        hide_it = hide or self._progress is False or not self._processes.first
        with self.answers.hold_file():
            about: dict[str, Any] = {"desc": self.preset.name, "unit": unit}
            about |= {"disable": hide_it or (None if self._progress is None else False)}
            with tqdm(total=len(mine), initial=sum(key in self.answers for key in mine), **about) as bar:
                yield mine, bar
        for lines in self._processes.gather([self.answers[key] for key in mine]):
            self.answers.learn(lines)
        self._used |= dict.fromkeys(wanted)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Takes the hook of `--use_cache`, whose keys name neither model nor preset.

        Raises:
            DllmError: unless the file's name does.
        """
        where = getattr(cache_hook.dbdict, "filename", None)
        if where is not None and self.identity not in where:
            advice = f"put {self.identity} into its name, or use answers=DIR, whose files name them"
            raise DllmError(f"the harness's cache {where} does not separate models and presets; {advice}")
        super().set_cache_hook(cache_hook)

    @property
    def identity(self) -> str:
        """12 hexadecimal digits of preset, model and seed."""
        return digest(self.answers.settings)[:12]

    def counts(self) -> dict[str, Any]:
        """Of all texts so far, those of earlier runs too: how many (`texts`), `compat_count` of the papers that were
        asked for, and what `evals.token_counts.speed_of` has, over the seconds of the slowest process. Of likelihoods:
        how many, and their forwards."""
        lines = [self.answers[key] for key in self._used]
        texts, forwards = [line for line in lines if "text" in line], [x["forwards"] for x in lines if "forwards" in x]
        found: dict[str, Any] = {"likelihoods": len(forwards), "forwards": sum(forwards)} if forwards else {}
        if not texts:
            return found
        seconds = slowest_seconds(texts)
        compat = count_as(self._counts, self.model, list(map(self._counted_answer, texts)), seconds)
        return found | {"texts": len(texts), **speed_of(texts, seconds), "compat_count": compat}

    def _counted_answer(self, line: Mapping[str, Any]) -> CountedAnswer:
        numbers = {name: line[name] for name in ("tokens", "nfe", "committed", "prompt_ids")}
        numbers["complete_at"] = line.get("complete_at")  # a line of an earlier version has none
        alone = line["seconds"] if line["slots"] == 1 else None
        return answer_of(self.model, line["canvas_ids"], line["until"], seconds=alone, **numbers)

    def get_model_info(self) -> dict[str, Any]:
        """The settings and counts that the harness adds to its results."""
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


@functools.cache
def _commit() -> str | None:
    """The commit of the library's checkout; None outside a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return found.stdout.strip() or None
