"""Typed decisions: choices and scores read from the canvas instead of from an answer's text.

found = decide(model, "Is the sky blue?", {"answer": ["yes", "no"], "urgency": range(1, 6)})
found.values, found.probabilities["answer"]["yes"]

The canvas is a template whose slots, one per field, are masks. A forward gives each slot's tokens a distribution; a
value's score is the sum of the log-probabilities of its tokens, and its probability a softmax over the field's values.
All slots are read from one forward, as if they were independent; `gamma` decides the surest first and reads the others
again, and `joint` scores every combination by the chain rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from tqdm import tqdm

from dllm_jax import DllmError, Model
from dllm_jax.parallel.sharding import check_splits
from samplers.checks import check_length
from samplers.decisions.answers import Decision, answer_questions
from samplers.decisions.questions import prepare_questions
from samplers.text.prompts import Prompt


@overload
def decide(model: Model, prompts: str, fields: Mapping[str, Iterable[Any]], **options: Any) -> Decision: ...


@overload
def decide(
    model: Model, prompts: Sequence[Prompt], fields: Mapping[str, Iterable[Any]], **options: Any
) -> list[Decision]: ...


def decide(  # type: ignore[misc]  # the overloads leave out the options' names
    model: Model,
    prompts: str | Sequence[Prompt],
    fields: Mapping[str, Iterable[Any]],
    *,
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    gamma: float | None = None,
    joint: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Decision | list[Decision]:
    """Decides the fields for each prompt. A decision depends on its prompt and fields alone, for a model without a mask
    token also on the seed and its number in the list.

    Args:
        prompts: as in `generate`: one string, or a list whose items are strings, token ids or lists of messages.
        fields: of each field its values: different strings, numbers or booleans, at least two.
        template: the text after the prompt, with `{name}` where a field's value stands; `{{` and `}}` are braces. Each
            piece of text is tokenised alone; the spaces before a slot are tokens of its values where the tokenizer
            would join them. Default: a line `name: {name}`
            for each field, after a line break if the prompt is a text without one. An end token follows.
        chat: take strings as a user's message in the model's chat format; system: with this system message.
        gamma: bound in nats on the entropies of fields that are decided by one forward (EB-Sampler, arXiv 2505.24857,
            equation 11, over fields): in rising order while the sum of those before is at most gamma, at least one.
            Further forwards read the others with these in place. None decides all by one.
        joint: score every combination, each of its tokens given those before it in the template, and decide by that.
            All is read at once, by as many sequences as there are beginnings of combinations.
        temperature: divides scores before they are normalised: above 1 where a model is too sure of itself.
        seed: of the random tokens that stand in slots of a model without a mask token.
        batch_size: sequences of a forward.
        progress: a progress bar over sequences; by default on a terminal.

    Returns:
        A `Decision` for a single string, else a list of them.

    Raises:
        DllmError: for models that read from left to right only, bad fields, templates, prompts or options, before
            anything is compiled; and for logits that are not finite.
    """
    if not isinstance(model, Model):
        raise DllmError(f"model is of type {type(model).__name__}; load one by dllm_jax.load")
    check_length("batch_size", batch_size)
    if model.layout is not None:
        check_splits(model.layout.mesh, batch_size, "rows of a batch")
    listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
    options: dict[str, Any] = {"gamma": gamma, "joint": joint, "temperature": temperature, "template": template}
    questions = prepare_questions(model, listed, fields, chat=chat, system=system, seed=seed, **options)
    with tqdm(desc="deciding", unit="row", disable=None if progress is None else not progress) as bar:
        found = answer_questions(model, questions, batch_size, bar.update)
    for number, decision in enumerate(found):
        if decision is None:
            raise DllmError(
                f"the model's logits for prompt {number} are not finite; load it in float32, or check its weights"
            )
    decisions = [decision for decision in found if decision is not None]
    return decisions[0] if isinstance(prompts, str) else decisions
