"""Infilling: a diffusion model fills gaps of a text, with the text on both sides as context.

found = infill(model, "The capital is<gap:8>, founded in<gap:4>.")
print(found.text, found.gaps)

A template is fixed pieces and gaps. `<gap:8>` is a gap of exactly 8 tokens; `<edit>a text</edit>` is one of as many as
the text has, which a model without a mask token (DiffusionGemma) starts from. Each fixed piece is tokenised alone, so
borders of gaps are borders of tokens. Most vocabularies have the space before a word in the word's token: leave it to
the gap. The text before the first gap is the prompt; the rest is the canvas, in which fixed pieces are given tokens.
Pieces may have special tokens: an end token after the last gap shows the model that the text ends there.

A backslash escapes a gap: `\\<gap:8>` is that text without the backslash, and `\\\\<gap:8>` a backslash and a gap;
`\\<edit>` likewise. Other backslashes stay as they are.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import numpy as np

from dllm_jax import DllmError, Model
from dllm_jax.text.tokenizer import encode_text, special_tokens
from samplers.checks import check_length, check_seed
from samplers.config.factory import CanvasSampler, find_end_ids
from samplers.config.registry import FORMS
from samplers.config.sampler_config import SamplerConfig, configure, make_sampler
from samplers.engine.requests import Request, Update, requests_of
from samplers.engine.runner import run_all
from samplers.generation import Generation, answer, finite_or_none
from samplers.inputs import open_id, start_from
from samplers.loops.left_to_right import LeftToRight
from samplers.rules import Rule
from samplers.text.decode import text_of
from samplers.text.prompts import Prompt, bucket_length, check_width, encode_prompt
from samplers.tokens.noise import row_keys

_GAP = re.compile(r"(\\*)(?:<gap(?:[:=\s]([^<>]*))?>|<edit>(?:(.*?)</edit>)?)", re.DOTALL)
_WITHOUT_EFFECT = ("gen_length", "stop", "ignore_eos", "fill_after_eos")
_LITERAL = r"put a backslash before it for the text itself, \<gap"


@dataclasses.dataclass(frozen=True)
class Infilling(Generation):
    """A filled template. The numbers are as in `Generation`; `prompt_tokens` counts all before the first gap.

    Attributes:
        text: the whole text: the fixed pieces, and the text of the gaps.
        tokens: token ids of the gaps, one gap after another.
        gaps: the text of each gap.
    """

    gaps: list[str] = dataclasses.field(default_factory=list)


class Template(NamedTuple):
    """A text with gaps.

    Attributes:
        pieces: fixed texts, one more than there are gaps; any may be empty.
        gaps: of each its tokens' number, or the text that is to be edited.
    """

    pieces: tuple[str, ...]
    gaps: tuple[int | str, ...]


class InfillPlan(NamedTuple):
    """Everything that `infill` prepares before the first forward.

    Attributes:
        sampler: its canvas has room for every row's.
        prompts: per row the tokens before the first gap.
        canvases: per row the tokens after it [N], -1 in gaps and the old ones in edited texts, and which of them are
            given [N] bool.
        templates: of each row.
        lengths: per row the tokens of each gap.
        heads, pieces: per row the tokens of the template's first piece, and of those after each gap.
        keys: a key per row.
    """

    sampler: CanvasSampler
    prompts: list[list[int]]
    canvases: list[tuple[np.ndarray, np.ndarray]]
    templates: list[Template]
    lengths: list[list[int]]
    heads: list[list[int]]
    pieces: list[list[list[int]]]
    keys: jax.Array


@overload
def infill(model: Model, templates: str, **options: Any) -> Infilling: ...


@overload
def infill(model: Model, templates: Sequence[str], **options: Any) -> list[Infilling]: ...


def infill(
    model: Model,
    templates: str | Sequence[str],
    *,
    prompt: Prompt | Sequence[Prompt] | None = None,
    chat: bool = False,
    system: str | None = None,
    sampler: str | Rule | SamplerConfig | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool | None = None,
    trace: bool = False,
    on_update: Callable[[Update], None] | None = None,
    **options: Any,
) -> Infilling | list[Infilling]:
    """Fills the gaps of texts.

    Every position of a gap gets a token that has text: special tokens, also end tokens, are suppressed, so an infilling
    never ends early. Blocks cover the canvas, fixed pieces included. A row depends on its template, its prompt, its
    number in the list and the seed; with `block_length=0` (one block) and a rule that counts steps also on the longest
    canvas.

    Args:
        templates: one text, or a list; the module's docstring has the syntax. A text that begins with a gap follows the
            model's start token.
        prompt: a prompt that the text answers, as `generate` takes it: one for all templates, or a list of one for
            each.
        chat, system: of the prompt, as in `generate`.
        sampler: a name, spec or rule for `make_sampler`; samplers from left to right cannot fill gaps.
        seed, batch_size, progress, trace, on_update: as in `generate`.
        options: see `make_sampler`. `gen_length` and `stop` are refused: the template determines where the text ends.
            regex and json_schema are the form of the text from the first gap on; a list has the form of each gap, None
            for any text.

    Returns:
        An `Infilling` for a single text, else a list of them.

    Raises:
        DllmError: for bad templates, prompts or options; before anything is compiled.
    """
    check_length("batch_size", batch_size, optional=True)
    listed = [templates] if isinstance(templates, str) else templates
    plan = prepare_infill(model, listed, prompt=prompt, chat=chat, system=system, sampler=sampler, seed=seed, **options)
    requests = requests_for(model, plan)
    _, ended = run_all(model, plan.sampler, requests, batch_size, progress, trace=trace, on_update=on_update)
    found = [infilling_of(model, plan, request) for request in ended]
    return found[0] if isinstance(templates, str) else found


def prepare_infill(
    model: Model,
    templates: Sequence[str],
    *,
    prompt: Prompt | Sequence[Prompt] | None = None,
    chat: bool = False,
    system: str | None = None,
    sampler: str | Rule | SamplerConfig | None = None,
    seed: int = 0,
    made: CanvasSampler | None = None,
    **options: Any,
) -> InfillPlan:
    """Everything that `infill` does before the first forward; it does not use the model's parameters.

    Args:
        made: a sampler that is built already, of `config_for_gaps`, instead of one for these templates; of the
            options, forms of a request are then checked.

    Raises:
        DllmError: as `infill`.
    """
    if not isinstance(model, Model):
        raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
    if isinstance(templates, bytes | Mapping) or not isinstance(templates, Sequence):
        raise DllmError(f"templates is of type {type(templates).__name__}; give a text with gaps or a list of them")
    check_seed(seed)
    parsed = [parse_template(text) for text in templates]
    pieces = [[_encode_piece(model, text) for text in template.pieces] for template in parsed]
    edited = [[_encode_piece(model, gap) if isinstance(gap, str) else None for gap in one.gaps] for one in parsed]
    lengths = [
        [gap if isinstance(gap, int) else len(old or ()) for gap, old in zip(one.gaps, own, strict=True)]
        for one, own in zip(parsed, edited, strict=True)
    ]
    before_text = _encode_prompts(model, prompt, len(parsed), chat=chat, system=system)
    prompts = [before + ids[0] or _start_tokens(model) for before, ids in zip(before_text, pieces, strict=True)]
    longest = max((len(row) for row in prompts), default=0)
    width = max((sum(own) + sum(map(len, ids[1:])) for ids, own in zip(pieces, lengths, strict=True)), default=1)
    if made is None:
        made = _sampler(model, sampler, options, parsed, longest, width)
    elif width > made.gen_length:
        room = f"there is room for {made.gen_length}; shorten it"
        raise DllmError(f"the template has {width} tokens from its first gap on and {room}")
    else:
        _check_forms(options, parsed)
    check_width(model, made, longest)  # before a canvas is made, which may be huge
    canvases = [_make_canvas(ids[1:], old, own) for ids, old, own in zip(pieces, edited, lengths, strict=True)]
    heads, rest = [ids[0] for ids in pieces], [ids[1:] for ids in pieces]
    keys = row_keys(jax.random.key(seed), len(parsed))
    return InfillPlan(made, prompts, canvases, parsed, lengths, heads, rest, keys)


def escape_gaps(text: str) -> str:
    """A template that is this text, without gaps."""
    return _GAP.sub(lambda match: match[1] + "\\" + match[0], text)


def parse_template(text: str) -> Template:
    """Reads a text with gaps.

    Raises:
        DllmError: for no string, no gap, a gap without a length of at least 1, and an edited text that is empty or does
            not end.
    """
    if not isinstance(text, str):
        raise DllmError(f"a template is a text with gaps such as <gap:8>, not a {type(text).__name__}")
    pieces, gaps, end = [""], list[int | str](), 0
    for match in _GAP.finditer(text):
        slashes = len(match[1])
        pieces[-1] += text[end : match.start()] + "\\" * (slashes // 2)
        end = match.end()
        if slashes % 2:
            pieces[-1] += match[0][slashes:]
            continue
        gaps.append(_parse_gap(match[0][slashes:], match[2], match[3]))
        pieces.append("")
    pieces[-1] += text[end:]
    if not gaps:
        raise DllmError(f"{text[:40]!r} has no gap; write <gap:8> where 8 tokens are to be written")
    return Template(tuple(pieces), tuple(gaps))


def _parse_gap(gap: str, length: str | None, old: str | None) -> int | str:
    """The number in a gap, or the text that is to be edited."""
    if gap.startswith("<edit>"):
        if not old:
            what = "has no text" if gap.endswith("</edit>") else "has no </edit>"
            raise DllmError(f"<edit> {what}; write <edit>a text</edit>, or {_LITERAL.replace('gap', 'edit')}")
        return old
    if not length or not re.fullmatch(r"[0-9]{1,9}", length) or int(length) < 1 or gap[4] != ":":
        raise DllmError(f"{gap} has no length; write <gap:8> for a gap of 8 tokens, or {_LITERAL}")
    return int(length)


def _encode_piece(model: Model, text: str) -> list[int]:
    ids = encode_text(model.require_tokenizer(), text) if text else []
    if open_id(model.denoiser) in ids:
        raise DllmError("a template contains the mask token; write <gap:1> in its place")
    return ids


def _encode_prompts(model: Model, prompt: Any, count: int, *, chat: bool, system: str | None) -> list[list[int]]:
    """Per template the tokens of the prompt that it answers."""
    if prompt is None:
        if chat or system is not None:
            raise DllmError("chat and system are options of a prompt; pass prompt= as well")
        return [[] for _ in range(count)]
    encode = functools.partial(encode_prompt, model, chat=chat, system=system)
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or _is_single_prompt(prompt):
        return [encode(prompt)] * count
    if len(prompt) != count:
        raise DllmError(f"there are {len(prompt)} prompts for {count} templates; give one for all, or one for each")
    return [encode(one) for one in prompt]


def _is_single_prompt(prompt: Sequence[Any]) -> bool:
    """Whether a list is token ids or messages, not prompts."""
    return any(isinstance(item, int | np.integer | Mapping) for item in prompt)


def _start_tokens(model: Model) -> list[int]:
    """The tokens before a text that begins with a gap: the start token, or none where the model needs none."""
    bos = model.config.bos_id
    if bos is None and model.denoiser.min_prompt_length:
        raise DllmError(f"{model.name} has no start token, so a template cannot begin with a gap; begin it with a text")
    return [] if bos is None else [bos]


def _make_canvas(
    pieces: Sequence[Sequence[int]], edited: Sequence[Sequence[int] | None], lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Gaps, each with the piece after it: tokens [N] int32, which begin with an edited text's or -1 in a gap, and which
    of them are given [N] bool."""
    tokens, given = [], []
    for piece, old, length in zip(pieces, edited, lengths, strict=True):
        tokens += [np.full(length, -1, np.int32) if old is None else np.asarray(old, np.int32)]
        tokens += [np.asarray(piece, np.int32)]
        given += [np.zeros(length, bool), np.ones(len(piece), bool)]
    return np.concatenate(tokens), np.concatenate(given)


def _sampler(
    model: Model,
    sampler: str | Rule | SamplerConfig | None,
    options: Mapping[str, Any],
    templates: Sequence[Template],
    prompt_length: int,
    longest: int,
) -> CanvasSampler:
    """A sampler with room for the longest canvas, in whole blocks: so few lengths are compiled, and no row's
    schedule depends on the longest."""
    if not (sampler is None or isinstance(sampler, str | Rule | SamplerConfig)):
        kind = type(sampler).__name__
        raise DllmError(f"sampler is of type {kind}; give a name or a rule, since the template is its canvas")
    config = configure(model, sampler, options)
    if written := [option for option in _WITHOUT_EFFECT if config.is_written(option)]:
        raise DllmError(f"{written[0]} has no effect on an infilling, which ends where its template does; leave it out")
    _check_forms(config.options, templates)
    config = config_for_gaps(model, config)
    block = config.options.get("block_length", getattr(config.kind, "block_length", None))
    check_length("block_length", block or None, optional=True)
    room = -(-longest // block) * block if block else bucket_length(longest)
    length = max(min(room, model.config.max_length - prompt_length), longest)
    return make_sampler(model, config.with_options(gen_length=length))


def _check_forms(options: Mapping[str, Any], templates: Sequence[Template]) -> None:
    """Raises DllmError for a list of forms that does not have one for each gap, and for gaps without a border."""
    listed = {name: options[name] for name in FORMS if isinstance(options.get(name), list | tuple)}
    for name, forms in listed.items():
        for template in templates:
            if len(forms) != len(template.gaps):
                count = f"the length of {name} is {len(forms)}, and the number of gaps {len(template.gaps)}"
                raise DllmError(f"{count}; give one form for each gap, None for any text")
            if "" in template.pieces[1:-1]:
                raise DllmError(f"{name} has a form for each gap, and two gaps adjoin; put a text between them")


def config_for_gaps(model: Model, config: SamplerConfig) -> SamplerConfig:
    """The sampler for canvases that end where they end, with text in every gap.

    Raises:
        DllmError: for a sampler that writes from left to right.
    """
    if issubclass(config.kind, LeftToRight):
        raise DllmError("gaps cannot be filled by a sampler that writes from left to right; use an unmasking rule")
    decided = {"ignore_eos": True, "suppress": _suppress_textless(model, config.options.get("suppress"))}
    if config.options.get("fill_after_eos"):  # of the checkpoint; an end token in a piece ends nothing
        decided["fill_after_eos"] = False
    return config.without("stop").with_options(**decided)


def _suppress_textless(model: Model, written: Any) -> Any:
    """The option `suppress` and all tokens that have no text: special ones, and ids that no token has."""
    written = find_end_ids(model.config, written)
    if written is not None and (isinstance(written, str) or not isinstance(written, Sequence)):
        return written  # which make_sampler refuses
    tokenizer = model.require_tokenizer()
    texts = set(tokenizer.get_vocab().values()) - set(special_tokens(tokenizer).values())
    return [*(written or ()), *sorted(set(range(model.config.vocab_size)) - texts)]


def infilling_of(model: Model, plan: InfillPlan, request: Request, row: int | None = None) -> Infilling:
    """The infilling of a request that has ended; `row` is its row of the plan, by default its number."""
    assert request.result is not None
    row, result = request.number if row is None else row, request.result
    given, template = plan.canvases[row][1], plan.templates[row]
    canvas = result.tokens[0, : len(given)].tolist()
    head, gaps, start = plan.heads[row], list[str](), 0
    for length, piece in zip(plan.lengths[row], plan.pieces[row], strict=True):
        gaps.append(_text_between(model, [*head, *canvas[:start]], canvas[start : start + length]))
        start += length + len(piece)
    text = "".join(itertools.chain(*zip(template.pieces, [*gaps, ""], strict=True)))
    own = {
        "text": text,
        "tokens": [token for token, fixed in zip(canvas, given, strict=True) if not fixed],
        "gaps": gaps,
        "canvas": canvas,
        "decoded_at": result.decoded_at[0, : len(given)].tolist(),
        "logprobs": finite_or_none(result.logprobs[0, : len(given)][~given]),
    }
    return Infilling(**{**vars(answer(model, plan.prompts[row], result, 0, trace=request.trace)), **own})


def requests_for(model: Model, plan: InfillPlan) -> list[Request]:
    """The rows of a plan as requests."""
    found, missing = requests_of(plan.sampler, plan.prompts, plan.keys), open_id(model.denoiser)
    for request, (tokens, given) in zip(found, plan.canvases, strict=True):
        start = np.where(tokens < 0, missing, start_from(tokens)) if missing < 0 else missing
        request.given = np.full(plan.sampler.gen_length, missing, np.int32)
        request.given[: len(tokens)] = np.where(given, tokens, start)
        request.gen_length = len(tokens)
    return found


def _text_between(model: Model, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens after others: in some vocabularies a text's first token loses its space."""
    first, both = text_of(model, before), text_of(model, [*before, *tokens])
    return both[len(first) :] if both.startswith(first) else text_of(model, tokens)
