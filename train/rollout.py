"""Rollouts: completions that the model being trained samples, and what their rewards make of them.

An iteration samples a group of completions for each of some prompts, by the weights that the state has at its start,
and learns from them in one round of steps. Everything is a pure function of these weights, the seed and the number of
the iteration, so a run that starts again from a state between two rounds repeats what the killed one did.

Several processes run one engine over the mesh in lock-step: each takes the same requests and reads the same progress.
Rewards may come from slow programs, so each group has one process that computes them and shares them with the others.
"""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dllm_jax import Denoiser, Model
from dllm_jax.errors import DllmError
from dllm_jax.parallel import multihost
from samplers.config.sampler_config import parse_sampler, refuse_twice
from samplers.engine.engine import Engine
from samplers.engine.requests import Request
from samplers.engine.slots import Size, sizes_up_to
from samplers.inputs import open_id
from samplers.loops.block import BlockSampler
from samplers.sampler import Result, describe_broken
from samplers.text.prompts import add_start_token, given_canvas
from train.data import ExampleLike, Rows, in_words
from train.settings import setting
from train.trajectory import step_numbers

Reward = Literal["correct", "partial"]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ScaleRewards = Literal["group", "batch", "none"]
Judge = Callable[[Any, list[int]], tuple[float, bool | None]]
"""Of an example, and the tokens that were generated for it: the reward, and whether a checker accepts them; None where
there is no checker."""

_DRAWS = 2**31 - 2  # no step has this number; steps are folded into the same key
_REWARDING = 8  # threads


@dataclasses.dataclass(frozen=True)
class RolloutPart:
    """How completions are sampled and rewarded.

    Attributes:
        sampler: a spec as everywhere, such as "topk:k=4,proxy=entropy" or "threshold:threshold=0.9,cache=dual"; a rule
            that never takes back what it wrote, with any cache, and nothing in it that changes the distribution which
            tokens are drawn from.
        temperature: of the draws, and of the distribution whose log-probabilities are learned.
        prompts: P, of an iteration.
        num_generations: completions of each prompt, a group, which are compared with one another.
        redraw: how often other prompts are drawn in the place of those whose completions all have the same reward, and
            so teach nothing (the dynamic sampling of DAPO, arXiv 2503.14476). What is left then is learned as it is.
        slots: completions that are sampled together, the next as soon as one has ended; 0 is all of an iteration.
        reward: "correct" is 1 for an answer that the task's checker accepts, else 0. "partial" is the task's
            score of answers that are partly right, in [0, 1]. A source with a `reward` of its own gives that.
    """

    sampler: str = "threshold"
    temperature: float = setting(1.0, at_least=1e-3)
    prompts: int = setting(8, at_least=1)
    num_generations: int = setting(8, at_least=2)
    redraw: int = setting(0, at_least=0)
    slots: int = setting(0, at_least=0)
    reward: Reward = "correct"

    @property
    def completions(self) -> int:
        """Of an iteration."""
        return self.prompts * self.num_generations


class Rollout(NamedTuple):
    """Completions to learn from.

    Attributes:
        tokens: [..., T] int32, prompt and canvas; the mask token where nothing was ever written.
        step: [..., T] int32, the step that wrote each position; -1 for prompts, given tokens and what none did.
        drawn: [..., T] bool, positions whose token was drawn from the model.
        lengths: [...] int32, positions that count.
        advantage: [...] float32, of the completion within its group.
        share: [...] float32, how much each of its drawn tokens counts, see `GrpoPart.loss_type`.
        old: [..., M, T] float32, log-probabilities of the tokens in M states by the weights that sampled them; None
            where these are the weights that learn.
    """

    tokens: jax.Array
    step: jax.Array
    drawn: jax.Array
    lengths: jax.Array
    advantage: jax.Array
    share: jax.Array
    old: jax.Array | None = None


def advantages(rewards: np.ndarray, scale: ScaleRewards) -> np.ndarray:
    """What completions are better by than their group: r - mean(r), over the standard deviation of the group's
    rewards (DeepSeekMath, arXiv 2402.03300) or of all ("batch"). 0 where the group's rewards are equal.

    Args:
        rewards: [P, num_generations] float64.

    Returns:
        [P, num_generations] float32.
    """
    apart = np.ptp(rewards, axis=1, keepdims=True) > 0
    found = np.where(apart, rewards - rewards.mean(axis=1, keepdims=True), 0.0)
    if scale != "none":
        spread = rewards.std(axis=1, keepdims=True) if scale == "group" else rewards.std()
        found = found / np.where(apart, spread, 1.0)
    return found.astype(np.float32)


def token_shares(draws: np.ndarray, loss_type: LossType, canvas: int) -> np.ndarray:
    """How much each drawn token of completions counts, [N] float32, before `Grpo.means` divides by how many completions
    or tokens there are.

    Args:
        draws: [N] of each completion.
        canvas: positions of it.
    """
    per = {"grpo": np.maximum(draws, 1), "dr_grpo": canvas}.get(loss_type, 1)
    return np.broadcast_to(1.0 / per, draws.shape).astype(np.float32)


def sampler_for(part: RolloutPart, model: Model, task: Any, gen_length: int) -> BlockSampler:
    """The sampler of rollouts.

    Args:
        model: its weights are not read.
        task: the task, which may define the canvas.
        gen_length: positions of the canvas, 0 if the task defines it.

    Raises:
        DllmError: for a spec that is none, and samplers whose draws are not those of the model's distribution.
    """
    config = parse_sampler(part.sampler)
    canvas = task if hasattr(task, "answer_width") else None
    if (canvas is None) == (gen_length == 0):
        fault = "is the task's own; leave it out" if canvas else "is not set; set it to the most tokens of an answer"
        raise DllmError(f"data.answer_length {fault}")
    own = {"temperature": part.temperature, **({} if canvas else {"gen_length": gen_length})}
    refuse_twice(config.options, own)
    config = config.with_options(**own)
    found = (config if canvas is None else config.for_canvas(canvas)).build(model)
    advice = "learn from another sampler"
    if not isinstance(found, BlockSampler):
        raise DllmError(f"rollout.sampler {part.sampler} has a loop of its own, whose drafts are not learned; {advice}")
    if found.rule.revises:
        raise DllmError(f"rollout.sampler {part.sampler} takes back what it wrote, which is not learned; {advice}")
    if found.fill_after_eos:
        raise DllmError(
            f"rollout.sampler {part.sampler}: fill_after_eos overwrites tokens that later forwards have read, so what "
            "was drawn can no longer be learned; leave it out"
        )
    names = ("guidance", "smoothing", "canvas_length")
    changed = [name for name in names if getattr(found, name) is not None]
    changed += [name for name in ("top_p", "top_k", "suppress") if getattr(found.sampling, name) is not None]
    if changed:
        raise DllmError(
            f"rollout.sampler {part.sampler}: with {changed[0]} tokens come from another distribution than the one "
            "that is learned; leave it out"
        )
    return found


def judge_of(part: RolloutPart, task: Any) -> Judge:
    """The function that rewards answers: a source's `reward(example, ids)`, or a task's checker, called once for each.

    Raises:
        DllmError: where there is neither.
    """
    if hasattr(task, "reward"):
        if part.reward != "correct":
            raise DllmError(f'rollout.reward is "{part.reward}" but data.source has a reward of its own; leave it out')
        return lambda example, ids: (float(task.reward(example, ids)), _is_correct(task, example, ids))
    if not hasattr(task, "verify"):
        raise DllmError(
            "data.source has no rewards; name a task, such as evals.tasks:make_task, or "
            "module:name of a source that has reward(example, ids)"
        )
    if part.reward == "partial":
        if in_words(task):
            raise DllmError('rollout.reward "partial" counts tokens, and the task has texts; reward what is "correct"')
        return lambda example, ids: (float(task.partial(example, ids)), _is_correct(task, example, ids))

    def judge(example: Any, ids: list[int]) -> tuple[float, bool | None]:
        correct = _is_correct(task, example, ids)
        return float(bool(correct)), correct

    return judge


def _is_correct(task: Any, example: Any, ids: list[int]) -> bool | None:
    """Whether a task's checker accepts an answer; None where it has none."""
    return bool(task.verify(example, ids).correct) if hasattr(task, "verify") else None


@dataclasses.dataclass
class Group:
    """The completions of one prompt, on the host.

    Attributes:
        example: what they answer.
        results: one for each completion.
        rewards: [num_generations] float64.
        correct: the task's checker's verdict on each completion; None where there is no checker.
    """

    example: ExampleLike
    results: list[Result]
    rewards: np.ndarray
    correct: list[bool | None]

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ."""
        return bool(np.ptp(self.rewards) > 0)


class Rollouts:
    """What feeds a run with completions of its own model.

    Attributes:
        round: steps that learn from the completions of one iteration.
        metrics: of the last iteration: mean reward, accuracy where the task has a checker, share of the groups whose
            rewards are all equal, mean forwards of a completion, seconds of sampling and rewarding.
    """

    def __init__(
        self,
        part: RolloutPart,
        rows: Rows,
        task: Any,
        sampler: BlockSampler,
        *,
        batch: tuple[int, int],
        num_iterations: int,
        loss_type: LossType,
        scale_rewards: ScaleRewards,
        policy: Callable[[Any], Denoiser],
        old: Callable[[Any, Rollout, int], jax.Array],
        sharding: NamedSharding,
    ) -> None:
        """
        Args:
            rows: of which the examples and their order are taken.
            task: the task, or a source with a `reward`.
            batch: of a step: parts that are computed one after another, and completions of each.
            num_iterations, loss_type, scale_rewards: as in `GrpoPart`.
            policy: the model with a state's weights, as it samples.
            old: log-probabilities of a batch's tokens by a state's weights, as the step of that number asks for them.
            sharding: of a step's batch.
        """
        self._part, self._rows, self._task, self._sampler = part, rows, task, sampler
        self._judge = judge_of(part, task)
        self._stops = getattr(task, "stops", True)
        self._batch, self._policy, self._old = batch, policy, old
        self._loss_type, self._scale_rewards = loss_type, scale_rewards
        self._sharding = sharding
        self._parts = part.completions // math.prod(batch)
        self.round = self._parts * num_iterations
        self.metrics: dict[str, float] = {}
        self._iteration, self._batches = -1, list[Rollout]()

    def check_start(self, step: int, position: int) -> None:
        # `--allow-change` can change the length of rounds.
        if step % self.round or position % (self.round * math.prod(self._batch)):
            raise DllmError(
                f"step {step} is amid an iteration of {self.round} steps; restore optimizer.batch, rollout.prompts, "
                "rollout.num_generations and objective.num_iterations"
            )

    def __call__(self, step: int, position: int, state: Any) -> Rollout:
        """The batch of step `step` (from 0); of the first of a round, the state that it begins with samples it.

        Args:
            position: completions that were learned before, each counted as often as it was learned.
        """
        size = math.prod(self._batch)
        iteration, rest = divmod(position, self.round * size)
        place = rest // size
        if iteration != self._iteration:
            self._start_iteration(iteration, step - place, state)
        return self._batches[place]

    def _start_iteration(self, iteration: int, first: int, state: Any) -> None:
        """Samples an iteration's completions and makes the batches of its steps, `first` and so on."""
        start = time.perf_counter()
        arrays = self._arrays(self._sample(iteration, self._policy(state)))
        size = math.prod(self._batch)
        cut = lambda x, place: x[place * size : (place + 1) * size].reshape(*self._batch, *x.shape[1:])
        batches = [jax.tree.map(lambda x, p=p: self._place(cut(x, p)), arrays) for p in range(self._parts)]
        batches *= self.round // self._parts
        if self.round > 1:
            batches = [x._replace(old=self._old(state, x, first + place)) for place, x in enumerate(batches)]
        self._iteration, self._batches = iteration, batches
        self.metrics["rollout_seconds"] = time.perf_counter() - start

    def _place(self, x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, self._sharding, lambda index: x[index])

    # Sampling --------------------------------------------------------------------------------------------------------

    def _sample(self, iteration: int, denoiser: Denoiser) -> list[Group]:
        """P groups to learn from: those that teach, and others only if these are too few.

        Every draw takes its prompts from rows of the data that no other draw or iteration takes.
        """
        part = self._part
        model = Model(denoiser.config, dict(denoiser.params), None, "the model being trained", layout=denoiser.layout)
        first, groups, missing = iteration * part.prompts * (part.redraw + 1), list[Group](), part.prompts
        for draw in range(part.redraw + 1):
            groups += self._sample_groups(model, first + draw * part.prompts, missing)
            missing = part.prompts - sum(group.teaches for group in groups)
            if not missing:
                break
        self._set_metrics(groups)
        others = [number for number, group in enumerate(groups) if not group.teaches]
        left_out = others[: len(others) - missing]
        return [group for number, group in enumerate(groups) if number not in left_out]

    def _engine(self, model: Model, completions: int) -> Engine:
        """With no more slots than these completions need: idle ones cost as much. All processes choose alike, which
        `buckets` of an engine, compiled in the background, do not."""
        longest = max(self._rows.part.length - self._sampler.gen_length, model.denoiser.min_prompt_length, 1)
        largest = Size(self._part.slots or self._part.completions, longest)
        rows = (size.rows for size in sizes_up_to(largest, model.denoiser.batch_parts))
        slots = min((count for count in rows if count >= completions), default=largest.rows)
        return Engine(model, self._sampler, slots=slots, prompt_length=longest)

    def _sample_groups(self, model: Model, first: int, count: int) -> list[Group]:
        """Groups for `count` prompts from position `first` of the data on. Completions are rewarded while others are
        sampled, the groups in turn by one of the processes each."""
        size = self._part.num_generations
        engine = self._engine(model, count * size)
        with multihost.fail_together():
            examples = [self._rows.source.example(self._rows.index(first + number)) for number in range(count)]
            for number, example in enumerate(examples):
                self._enqueue(model, engine, example, (first + number) * size)
        found: dict[int, Result] = {}
        own = range(multihost.index(), count, multihost.count())
        with multihost.fail_together(), concurrent.futures.ThreadPoolExecutor(_REWARDING) as threads:
            scores = {}
            for request in engine.results():
                assert request.result is not None
                number = request.number - first * size
                if sentence := describe_broken(request.result.broken_at, [number]):
                    raise DllmError(f"{sentence}; lower optimizer.lr, and resume from the last state")
                found[number] = request.result
                if (place := number // size) in own:
                    scores[number] = threads.submit(self._score, examples[place], request.result)
            scored = [[scores[place * size + number].result() for number in range(size)] for place in own]
        parts, groups = multihost.gather(scored), []
        for place, example in enumerate(examples):
            rewards, correct = zip(*parts[place % len(parts)][place // len(parts)], strict=True)
            results = [found[place * size + number] for number in range(size)]
            groups.append(Group(example, results, np.asarray(rewards), list(correct)))
        return groups

    def _enqueue(self, model: Model, engine: Engine, example: ExampleLike, first: int) -> None:
        """Requests a group. Its completions have the numbers from `first` on, which determine their draws."""
        prompt, length = add_start_token(model, example.prompt_ids), self._gen_length(example)
        if len(prompt) + length > self._rows.part.length:
            raise DllmError(
                f"a prompt of {len(prompt)} tokens and a canvas of {length} do not fit data.length "
                f"{self._rows.part.length}; raise it"
            )
        answer = (np.asarray(example.answer_ids), example.given)
        given = given_canvas([answer], self._sampler.gen_length, open_id(model.denoiser))
        numbers = first + np.arange(self._part.num_generations)
        key = jax.random.fold_in(jax.random.key(self._rows.seed), _DRAWS)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(numbers, jnp.uint32))
        for number, data in zip(numbers.tolist(), np.asarray(jax.random.key_data(keys)), strict=True):
            own = None if given is None else given[0]
            engine.submit(Request(prompt=prompt, gen_length=length, key_data=data, given=own, number=number))

    def _gen_length(self, example: ExampleLike) -> int:
        return self._sampler.gen_length if self._stops else len(example.answer_ids)

    def _score(self, example: ExampleLike, result: Result) -> tuple[float, bool | None]:
        """The reward of an answer, and whether it is right; None where there is no checker."""
        end = int(result.lengths[0]) if self._stops else len(example.answer_ids)
        ids = np.asarray(result.tokens[0])[:end].tolist()
        reward, correct = self._judge(example, ids)
        if not math.isfinite(reward):
            raise DllmError(f"the reward of an answer is {reward}; give finite numbers")
        return reward, correct

    def _set_metrics(self, groups: Sequence[Group]) -> None:
        """Sets the metrics of an iteration, of all groups that were sampled."""
        self.metrics = {"reward": float(np.mean([group.rewards for group in groups]))}
        correct = [verdict for group in groups for verdict in group.correct if verdict is not None]
        if correct:
            self.metrics["accuracy"] = float(np.mean(correct))
        self.metrics["same"] = float(np.mean([not group.teaches for group in groups]))
        self.metrics["nfe"] = float(np.mean([result.nfe[0] for group in groups for result in group.results]))

    # Arrays ----------------------------------------------------------------------------------------------------------

    def _arrays(self, groups: Sequence[Group]) -> Rollout:
        """The completions as arrays [completions, ...] on the host."""
        answers = [(group.example, result) for group in groups for result in group.results]
        results = jax.tree.map(lambda *rows: np.concatenate(rows), *(result for _, result in answers))
        steps = np.asarray(step_numbers(jnp.asarray(results.decoded_at)))
        count, length = len(answers), self._rows.part.length
        config = self._rows.config
        tokens = np.full((count, length), config.eos_id, np.int32)
        step, drawn = np.full((count, length), -1, np.int32), np.zeros((count, length), bool)
        lengths = np.zeros(count, np.int32)
        shell = Model(config, {}, None, "the model being trained")
        for row, (example, _) in enumerate(answers):
            prompt, size = add_start_token(shell, example.prompt_ids), self._gen_length(example)
            canvas = slice(len(prompt), len(prompt) + size)
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt) + size
            written = steps[row, :size] >= 0
            rest = np.full(size, config.mask_id, np.int32)
            if example.given is not None:
                known = np.asarray(example.given, bool)
                rest[: len(known)][known] = np.asarray(example.answer_ids)[known]
            tokens[row, canvas] = np.where(written, results.tokens[row, :size], rest)
            step[row, canvas] = steps[row, :size]
            drawn[row, canvas] = written & np.isfinite(results.logprobs[row, :size])
        share = token_shares(drawn.sum(axis=1), self._loss_type, self._sampler.gen_length)
        better = advantages(np.stack([group.rewards for group in groups]), self._scale_rewards).reshape(-1)
        return Rollout(tokens, step, drawn, lengths, better, share)  # type: ignore[arg-type]


def steps_per_round(part: RolloutPart, batch: int, num_iterations: int) -> int:
    """Steps of an iteration.

    Raises:
        DllmError: when completions and batches do not fit.
    """
    if part.completions % batch:
        raise DllmError(
            f"rollout.prompts {part.prompts} times rollout.num_generations {part.num_generations} are "
            f"{part.completions} completions, no whole number of batches of optimizer.batch {batch}; change one of them"
        )
    return part.completions // batch * num_iterations
