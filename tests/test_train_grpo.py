"""Learning from rewards: the loss against the formula written out, what is sampled, and whole runs."""

import dataclasses
import itertools
import json
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_run import assert_same, latest_state, lines
from train_toys import DREAM, LLADA, SPECIAL, Liked, model_fields, settings, write_toml

import dllm_jax
import train
from convert import embedded
from convert.hub_folder import copied_files
from dllm_jax import Denoiser, DllmError
from dllm_jax.checkpoints import checkpoint
from dllm_jax.params.specs import init_params
from evals.tasks import make_task
from samplers.engine.program import run_steps_jit
from samplers.tokens.predictions import Sampling, given, predict
from train.__main__ import main
from train.losses import mean_values
from train.objectives import OBJECTIVES
from train.objectives.grpo import Grpo, GrpoConfig, GrpoPart, choose_states
from train.rollout import Rollout, RolloutPart, Rollouts, advantages, judge_of, token_shares
from train.run_dir import read_settings
from train.settings import build_settings
from train.setup import read_parts
from train.step import training_mesh
from train.trainer import Run, placement_of

T, CANVAS, MASK = 12, 6, LLADA.mask_id


LIKED = {
    "data": {"source": "train_toys:Liked", "length": T, "answer_length": CANVAS},
    "rollout": {"sampler": "topk:k=2,proxy=entropy,ignore_eos=true", "prompts": 2, "num_generations": 4},
    "checkpoint__every": 2,
    "log__every": 1,
}


def table(out, **changes):
    """A small run on `Liked`: two prompts of four completions, learned in one step."""
    return settings(out, **{**LIKED, **changes})


def config_of(out, **changes):
    return build_settings(GrpoConfig, table(out, **changes))


def run_of(config):
    parts, _ = read_parts(config).check_examples(config, progress=False)
    return Run(config, parts, placement_of(config, parts.model, training_mesh(config)))


def completions(seed=0, *, shift=0):
    """Three completions by hand: steps that wrote one, two or no position, a given token, a position that none wrote, a
    token that was filled and not drawn; their old log-probabilities are random."""
    rng = np.random.default_rng(seed)
    prompts, canvases = (1 + shift, 3, 2), (6, 4, 6)
    steps = [[0, 0, 1, 2, 2, 3], [1, -1, 0, 1], [0, 1, 2, 3, 4, -1]]
    tokens, step = rng.integers(0, 10, (3, T)), np.full((3, T), -1)
    for row, (prompt, canvas) in enumerate(zip(prompts, canvases, strict=True)):
        step[row, prompt : prompt + canvas] = steps[row]
    drawn = step >= 0
    drawn[2, prompts[2] + 3] = False
    tokens[2, prompts[2] + 5] = MASK
    lengths = np.asarray(prompts) + canvases
    share = 1 / drawn.sum(axis=1)
    advantage = np.asarray([0.7, -1.2, 0.4], np.float32)
    arrays = (tokens, step, drawn, lengths, advantage, share.astype(np.float32))
    return Rollout(*map(jnp.asarray, arrays)), prompts


def reference(part, temperature, model, base, batch, old):
    """The loss and its parts, one draw at a time."""
    total, kls = 0.0, []
    for row in range(3):
        step, tokens, length = np.asarray(batch.step[row]), np.asarray(batch.tokens[row]), int(batch.lengths[row])
        shrink = part.shrink or T
        for first in range(0, step.max() + 1, shrink):
            state = np.where(step >= first, MASK, tokens)[:length]
            tempered = (x(jnp.asarray(state)[None])[0] / temperature for x in (model, base))
            log, frozen = (jax.nn.log_softmax(x.at[:, MASK].set(-jnp.inf)) for x in tempered)
            for place in np.flatnonzero((step >= first) & (step < first + shrink) & np.asarray(batch.drawn[row])):
                new, a = log[place, tokens[place]], batch.advantage[row]
                ratio = jnp.exp(new - old[row, place])
                gain = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - part.epsilon, 1 + part.epsilon) * a)
                q = frozen[place, tokens[place]]
                kls.append(jnp.exp(q - new) - (q - new) - 1)
                total += batch.share[row] * (part.beta * kls[-1] - gain)
    return total / 3, sum(kls) / len(kls)


@pytest.mark.parametrize(("shrink", "chunk", "shift"), [(1, 0, 0), (2, 3, 0), (0, 0, 0), (1, 4, 1)])
def test_the_loss_is_the_formula(shrink, chunk, shift):
    config = DREAM if shift else LLADA
    params, frozen = (init_params(config, jax.random.key(seed), dtype="float32") for seed in (0, 1))
    part = GrpoPart(shrink=shrink, chunk=chunk, beta=0.3, states=T)
    objective = Grpo(part, 0.8)
    batch, _ = completions(shift=shift)
    noised = objective.corrupt(jax.random.key(2), batch, Denoiser(config, {}))
    near = objective.logprobs(Denoiser(config, params), noised)
    old = near + 0.3 * jax.random.normal(jax.random.key(3), (3, T))[:, None]  # some ratios clipped, some not
    batch = batch._replace(old=old)

    def ours(params):
        noised = objective.corrupt(jax.random.key(2), batch, Denoiser(config, {}))
        return objective.loss(Denoiser(config, params), Denoiser(config, frozen), noised)

    group = lambda row, place: int(batch.step[row, place]) // (shrink or T)
    where = lambda row, place: next(
        m for m in range(noised.weights.shape[1]) if noised.weights[row, m, place] > 0 or not batch.drawn[row, place]
    )
    flat = np.zeros((3, T), np.float32)
    for row, place in itertools.product(range(3), range(T)):
        flat[row, place] = old[row, where(row, place), place] if group(row, place) >= 0 else 0
    wanted = lambda params: reference(
        part, 0.8, Denoiser(config, params), Denoiser(config, frozen), batch, jnp.asarray(flat)
    )
    (loss, metrics), gradient = jax.value_and_grad(ours, has_aux=True)(params)
    (value, kl), slope = jax.value_and_grad(wanted, has_aux=True)(params)
    np.testing.assert_allclose(loss, value, rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"], kl, rtol=1e-4)
    assert 0 < metrics["clipped"] < 1
    for name, x in gradient.items():
        np.testing.assert_allclose(x, slope[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_first_update_is_the_policy_gradient_and_clipped_ratios_teach_nothing(level):
    params = init_params(LLADA, jax.random.key(0), dtype="float32")
    part, key = GrpoPart(states=T, epsilon=0.2, importance_sampling_level=level), jax.random.key(2)
    objective = Grpo(part)
    batch, _ = completions()
    noised = objective.corrupt(key, batch, Denoiser(LLADA, {}))

    def gradient(old):
        of = lambda params: objective.loss(Denoiser(LLADA, params), Denoiser(LLADA, {}), noised._replace(old=old))
        (loss, metrics), found = jax.value_and_grad(of, has_aux=True)(params)
        return loss, metrics, found

    def plain(params):  # - mean of A log pi
        new = objective.logprobs(Denoiser(LLADA, params), noised)
        return -jnp.sum(noised.weights * (batch.share * batch.advantage)[:, None, None] * new) / 3

    old = objective.logprobs(Denoiser(LLADA, params), noised)
    wanted = jax.grad(plain)(params)
    for at in (None, old):
        loss, metrics, found = gradient(at)
        np.testing.assert_allclose(loss, -batch.advantage.mean(), rtol=1e-5)
        assert metrics["clipped"] == 0 and metrics["entropy"] > 0 and "kl" not in metrics
        for name, x in wanted.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-6, err_msg=name)
    better = batch.advantage[:, None, None] > 0
    loss, metrics, found = gradient(jnp.where(better, old - 1, old + 1))  # gone too far, each in its direction
    assert metrics["clipped"] == 1 and all(not np.any(x) for x in found.values())
    loss, metrics, found = gradient(jnp.where(better, old + 1, old - 1))  # gone too far the other way
    assert metrics["clipped"] == 0 and all(np.any(x) for name, x in found.items() if "kernel" in name)


CHOICES = [
    {"epsilon_high": 0.5},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo", "epsilon_high": 0.5},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "loss_type": "dapo", "epsilon_high": 0.5},
]


def by_hand(part, drawn, new, old, q, advantage):
    """The loss of a batch of several parts: arrays [parts, rows, T] of draws and log-probabilities, [parts, rows]."""
    draws, ratio, a = drawn.sum(axis=2), np.exp(new - old), advantage[..., None]
    if part.importance_sampling_level == "sequence":
        mean = np.where(drawn, new - old, 0).sum(axis=2) / draws
        ratio = np.broadcast_to(np.exp(mean)[..., None], drawn.shape)
    high = part.epsilon if part.epsilon_high is None else part.epsilon_high
    kl = np.exp(q - new) - (q - new) - 1
    loss = part.beta * kl - np.minimum(ratio * a, np.clip(ratio, 1 - part.epsilon, 1 + high) * a)
    loss = np.where(drawn, loss, 0)
    if part.loss_type == "grpo":
        return (loss.sum(axis=2) / draws).mean()
    if part.loss_type == "bnpo":
        return (loss.sum(axis=(1, 2)) / draws.sum(axis=1)).mean()
    return loss.sum() / (draws.sum() if part.loss_type == "dapo" else draws.size * CANVAS)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
def test_choices_are_their_formulas(choice):
    """Of a batch in two parts with different numbers of draws; ratios lie on both sides of both bounds, so that each
    choice changes the loss by more than the tolerance, which is of rounding."""
    part = GrpoPart(states=T, beta=0.3, **choice)
    objective, usual = Grpo(part), GrpoPart(states=T, beta=0.3)
    learner, base = (Denoiser(LLADA, init_params(LLADA, jax.random.key(seed), dtype="float32")) for seed in (0, 1))
    first, _ = completions()
    parts, arrays = [], []
    for seed, kept in enumerate((T, 1)):  # of the second part only what the first two steps drew
        drawn = first.drawn & (first.step <= kept)
        share = token_shares(np.asarray(drawn.sum(axis=1)), part.loss_type, CANVAS)
        batch = first._replace(drawn=drawn, share=jnp.asarray(share))
        noised = objective.corrupt(jax.random.key(2), batch, learner)
        new, q = (objective.logprobs(model, noised) for model in (learner, base))
        noised = noised._replace(old=new + 0.5 * jax.random.normal(jax.random.key(seed), new.shape))
        parts.append(objective.means(learner, base, noised))
        of_draw = lambda x, noised=noised: np.where(noised.weights > 0, x, 0).sum(axis=1, dtype=np.float64)
        arrays.append((np.asarray(drawn), *map(of_draw, (new, noised.old, q)), np.asarray(batch.advantage)))
    arrays = [np.stack(pair) for pair in zip(*arrays, strict=True)]
    found = mean_values(jax.tree.map(jnp.add, *parts))
    np.testing.assert_allclose(found["loss"], by_hand(part, *arrays), rtol=1e-4)
    assert abs(by_hand(usual, *arrays) - by_hand(part, *arrays)) > 0.01


def test_states_are_drawn_without_repetition_and_count_as_all_of_them_would():
    count = jnp.asarray([0, 1, 3, 5])
    numbers, weight = choose_states(jax.random.uniform(jax.random.key(0), (400, 4, T)), jnp.tile(count, (400, 1)), 3)
    kept = np.where(weight > 0, numbers, -1)
    assert (np.asarray(weight > 0).sum(-1) == [0, 1, 3, 3]).all()
    assert all(len({*row[row >= 0]}) == (row >= 0).sum() for row in kept.reshape(-1, 3))
    np.testing.assert_allclose(np.asarray(weight).sum(-1), np.tile(count, (400, 1)), rtol=1e-6)
    often = [(kept[:, 3] == state).sum() / 400 for state in range(5)]
    np.testing.assert_allclose(often, 3 / 5, atol=0.1)
    assert (np.sort(kept[:, 2], axis=-1) == [0, 1, 2]).all()


def test_tokens_that_were_not_generated_are_masked_at_random():
    batch, prompts = completions()
    every = Grpo(GrpoPart(shrink=0, mask_prompt=1.0)).corrupt(jax.random.key(0), batch, Denoiser(LLADA, {}))
    none = Grpo(GrpoPart(shrink=0)).corrupt(jax.random.key(0), batch, Denoiser(LLADA, {}))
    for row, prompt in enumerate(prompts):
        length = int(batch.lengths[row])
        assert (np.asarray(every.inputs[row, 0, :length]) == MASK).all()
        assert (np.asarray(none.inputs[row, 0, :prompt]) == np.asarray(batch.tokens[row, :prompt])).all()
        assert (np.asarray(none.weights[row, 0] > 0) == np.asarray(batch.drawn[row])).all()
    assert none.inputs.shape[1] == 1  # states is for trajectories


def test_answers_are_checked_once(tmp_path, monkeypatch):
    """A checker may run a program: one verdict is the reward and what the accuracy counts."""
    task = make_task("sudoku:box_rows=2,box_columns=2")
    example, asked, verify = task.example("train", 0), [], type(task).verify
    monkeypatch.setattr(type(task), "verify", lambda self, *a: asked.append(a) or verify(self, *a))
    right = example.answer_ids.tolist()
    assert judge_of(RolloutPart(), task)(example, right) == (1.0, True) and len(asked) == 1
    assert judge_of(RolloutPart(), task)(example, right[::-1]) == (0.0, False) and len(asked) == 2
    assert judge_of(RolloutPart(reward="partial"), task)(example, right) == (1.0, True) and len(asked) == 3
    assert judge_of(RolloutPart(), Liked())(example, [1, 1, 1]) == (0.5, None)


def test_advantages():
    rewards = np.asarray([[1.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7], [0.1, 0.1, 0.1, 0.4]])
    found = advantages(rewards, "group")
    np.testing.assert_allclose(found[0], [1, -1, -1, 1])
    assert (found[1] == 0).all()
    np.testing.assert_allclose(found[2].std(), 1, rtol=1e-6)
    np.testing.assert_allclose(advantages(rewards, "none")[2], [-0.075, -0.075, -0.075, 0.225], rtol=1e-6)
    every = [1.0] * 2 + [0.0] * 2 + [0.7] * 4 + [0.1] * 3 + [0.4]
    spread = math.sqrt(sum((x - sum(every) / 12) ** 2 for x in every) / 12)
    wanted = np.asarray([[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0], [-0.075, -0.075, -0.075, 0.225]]) / spread
    np.testing.assert_allclose(advantages(rewards, "batch"), wanted, rtol=1e-6)


SHORT_BLOCKS = (
    "topk:k=1,proxy=entropy,block_length=3",
    "threshold:threshold=0.2,block_length=4",
    "eb:gamma=2,block_length=3",
)


def often(run, token):
    """The state before the first step, but with weights by which about half of all tokens are `token`: every embedding,
    and so every hidden state, has a share that only this token's column of the head reads."""
    state = run.initial_state()
    weights = dict(state.trained)
    weights["embed.embedding"] = weights["embed.embedding"].at[:, 0].set(0.1)
    weights["lm_head.kernel"] = weights["lm_head.kernel"].at[0].set(0.0).at[0, token].set(1.0)
    return dataclasses.replace(state, trained=weights)


@pytest.mark.parametrize("sampler", SHORT_BLOCKS)
def test_the_learner_has_the_log_probabilities_of_the_sampler(tmp_path, sampler, monkeypatch):
    """What was drawn, recomputed from the states that the steps are turned back to. Among the rows are some that an end
    token ended, on every CPU: of 16 first blocks, all tokens of which are end tokens by one chance in two, several have
    one, and what lies behind is then never written."""
    sampled, arrays = [], Rollouts._arrays
    monkeypatch.setattr(Rollouts, "_arrays", lambda self, found: sampled.append(found) or arrays(self, found))
    changes = {"rollout__sampler": sampler, "rollout__num_generations": 8, "optimizer__batch": 16}
    objective = {"states": CANVAS, "num_iterations": 2, "loss_type": "dr_grpo", "scale_rewards": "none"}
    run = run_of(config_of(tmp_path, **changes, objective=objective))
    state = often(run, LLADA.eos_id)
    batch = run.feed(0, 0, state)
    noised = jax.tree.map(lambda x: np.asarray(x[0]), run.stepper.add_noise(batch, jax.random.key(0), jnp.int32(0)))
    learned, drawn = noised.weights > 0, np.asarray(batch.drawn[0])
    assert (learned.sum(axis=1) == drawn).all() and drawn.any(axis=1).all()
    rewards = np.stack([group.rewards for group in sampled[0]])
    better = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
    np.testing.assert_allclose(batch.advantage[0], better, atol=1e-6)
    np.testing.assert_allclose(batch.share[0], 1 / CANVAS)
    decided = [np.asarray(result.decoded_at[0]) for group in sampled[0] for result in group.results]
    assert sum((steps < 0).any() for steps in decided) >= 2 and max(map(max, decided)) > 0
    model, inputs = Denoiser(LLADA, dict(state.trained)), noised.inputs
    logits = model(inputs.reshape(-1, T), np.repeat(noised.lengths, inputs.shape[1])).reshape(*inputs.shape, -1)
    token = lambda log: np.take_along_axis(np.asarray(log), noised.tokens[:, None, :, None], axis=-1)[..., 0]
    models = token(jax.nn.log_softmax(logits))  # which counts the mask token; draws never are one
    policys = token(jax.nn.log_softmax(jnp.where(jnp.arange(LLADA.vocab_size) == MASK, -jnp.inf, logits)))
    np.testing.assert_allclose(np.asarray(batch.old[0])[learned], policys[learned], atol=2e-5)
    found = np.where(learned, models, 0).sum(axis=1)
    for row, result in enumerate(result for group in sampled[0] for result in group.results):
        prompt, logprobs = int(batch.lengths[0, row]) - CANVAS, np.asarray(result.logprobs[0])
        assert (np.isfinite(logprobs) == drawn[row, prompt : prompt + CANVAS]).all()
        np.testing.assert_allclose(found[row, prompt : prompt + CANVAS], np.nan_to_num(logprobs), atol=2e-5)


def test_the_policy_is_what_the_sampler_draws_from():
    """A model in which the mask token is the most probable: how often tokens are drawn, over all draws of a position,
    and their probabilities. Of no draw is that token, so the others' probabilities add up to 1, and entropy and KL are
    theirs."""
    params, base = (init_params(LLADA, jax.random.key(seed), dtype="float32") for seed in (0, 1))
    boost = lambda x: x.at[:, MASK].set(0.0).at[:, 0].multiply(40)
    params, base = (x | {"lm_head.kernel": boost(x["lm_head.kernel"])} for x in (params, base))
    batch, _ = completions()
    model, temperature = Denoiser(LLADA, params), 0.7
    objective = Grpo(GrpoPart(states=T, beta=0.3), temperature)
    noised = objective.corrupt(jax.random.key(2), batch, model)
    run = lambda model: jax.jit(lambda tokens, lengths: model(tokens, lengths))
    logits = run(model)(noised.inputs[0], jnp.repeat(noised.lengths[0], T))[:1, 1:2]  # of one position
    assert jax.nn.softmax(logits / temperature)[0, 0, MASK] > 0.02
    every = lambda token: noised._replace(tokens=jnp.full_like(noised.tokens, token))
    logprob = jax.jit(lambda token: objective.logprobs(model, every(token))[0, 0, 1])
    probability = np.exp([logprob(token) for token in range(LLADA.vocab_size)])
    draws = 20_000
    repeated = given(jnp.broadcast_to(logits, (1, draws, LLADA.vocab_size)))
    uniform = jax.random.uniform(jax.random.key(5), (1, draws, LLADA.vocab_size), minval=1e-7)
    draw = lambda ids: uniform[..., ids]
    token = predict(repeated, Sampling(temperature), mask_id=MASK, score_from="raw", draw=draw).token
    frequency = np.bincount(np.asarray(token).reshape(-1), minlength=LLADA.vocab_size) / draws
    assert frequency[MASK] == 0 == probability[MASK]
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(frequency, probability, atol=5 * np.sqrt(0.25 / draws))

    def log(model):
        logits = run(model)(noised.inputs.reshape(-1, T), jnp.repeat(noised.lengths, T)) / temperature
        return jax.nn.log_softmax(logits.at[..., MASK].set(-jnp.inf)).reshape(3, T, T, -1)

    counted, kept = noised.weights > 0, np.arange(LLADA.vocab_size) != MASK
    entropy = -(jnp.exp(log(model)) * log(model))[..., kept].sum(axis=-1)[counted].mean()
    own = lambda model: jnp.take_along_axis(log(model), noised.tokens[:, None, :, None], axis=-1)[..., 0][counted]
    behind = own(Denoiser(LLADA, base)) - own(model)
    loss, metrics = jax.jit(objective.loss)(model, Denoiser(LLADA, base), noised)
    assert np.isfinite(loss)
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"], (jnp.exp(behind) - behind - 1).mean(), rtol=1e-3)


def told(out):
    """The log without what the clock says."""
    timed = ("seconds", "rollout_seconds", "tokens_per_second")
    return [{name: x for name, x in line.items() if name not in timed} for line in lines(out)]


CHANGES = {"steps": 12, "checkpoint__every": 4, "objective": {"num_iterations": 2, "beta": 0.1}, "optimizer__batch": 4}


def test_killed_and_resumed_is_as_if_nothing_had_been(tmp_path, monkeypatch):
    """Rounds of four steps: a reward that dies ends the run in the second, a signal asks for its end in the third."""
    base = tmp_path / "base"
    train.train(build_settings(OBJECTIVES["masked-diffusion"].config, settings(base, steps=2)))
    changes = CHANGES | {"model": {"init": str(base / "model")}, "lora": {"rank": 2}}
    train.train(config_of(tmp_path / "whole", **changes))
    out, reward, calls = tmp_path / "run", Liked.reward, itertools.count()

    def failing(self, example, ids):
        number = next(calls)
        if number == 12:  # of eight in a round
            raise DllmError("the sandbox is gone")
        if number == 30:
            os.kill(os.getpid(), signal.SIGTERM)
        return reward(self, example, ids)

    monkeypatch.setattr(Liked, "reward", failing)
    with pytest.raises(DllmError, match="the sandbox is gone"):
        train.train(config_of(out, **changes))
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4]
    calls = itertools.count(24)
    with pytest.raises(train.Interrupted, match="interrupted after step 8"):
        train.train(config_of(out, **changes))
    outcome = train.train(config_of(out, **changes))
    assert outcome.started == 8 and outcome.folder == out / "adapters"
    assert_same(latest_state(out), latest_state(tmp_path / "whole"))
    assert told(out) == told(tmp_path / "whole")
    assert len({line["reward"] for line in told(out)}) > 1
    assert {"kl", "entropy", "clipped", "nfe", "same"} < told(out)[0].keys()


def test_a_changed_batch_goes_on_with_the_next_prompts(tmp_path, monkeypatch):
    """Iterations are counted in the data, not in steps; where one is cut in two, the change is refused."""
    asked, example = [], Liked.example
    monkeypatch.setattr(Liked, "example", lambda self, index: asked.append(index) or example(self, index))
    changed = lambda batch, **more: config_of(tmp_path, optimizer__batch=batch, **more)
    train.train(changed(8, steps=2))
    assert max(asked) == 3  # two prompts each
    asked.clear()
    assert train.train(changed(4, steps=4), allow_change=["optimizer.batch"]).started == 2
    assert set(asked) == {0, 4, 5}  # 0 is looked at before
    amid = {"steps": 8, "checkpoint__every": 8, "objective": {"num_iterations": 4}}
    with pytest.raises(DllmError, match="restore optimizer.batch"):
        train.train(changed(4, **amid), allow_change=["objective.num_iterations"])


def test_devices_share_sampling_and_learning(tmp_path):
    # One iteration: weights that have learned differ by rounding, and the next one's draws may then be others.
    changes = CHANGES | {"steps": 4, "objective": {"num_iterations": 2, "chunk": 16}}
    outs = [tmp_path / name for name in ("one", "many")]
    for out, mesh in zip(outs, ({}, {"data": 2, "fsdp": 2}), strict=True):
        train.train(config_of(out, compute__mesh=mesh, **changes))
    one, many = map(told, outs)
    assert [line["reward"] for line in one] == [line["reward"] for line in many]
    assert all(line["grad_norm"] > 0 for line in one)
    np.testing.assert_allclose([x["grad_norm"] for x in one], [x["grad_norm"] for x in many], rtol=1e-3)
    for name, x in latest_state(outs[0]).items():
        np.testing.assert_allclose(x, latest_state(outs[1])[name], atol=2e-4, err_msg=name)


def test_rewards_rise_and_every_number_of_slots_is_compiled_once(tmp_path, monkeypatch):
    """A random model learns to write the tokens that are liked; prompts of one reward make room for others."""
    sizes, begin = [], Rollouts._start_iteration
    programs = run_steps_jit._cache_size
    monkeypatch.setattr(Rollouts, "_start_iteration", lambda self, *a: sizes.append(programs()) or begin(self, *a))
    rollout = {"sampler": "topk:k=2,proxy=entropy,ignore_eos=true", "prompts": 4, "redraw": 2, "slots": 12}
    train.train(
        config_of(tmp_path, steps=40, optimizer__batch=32, optimizer__lr=0.02, checkpoint__every=40, rollout=rollout)
    )
    found = [line["reward"] for line in told(tmp_path)]
    assert np.mean(found[:3]) < 0.65 and np.mean(found[-5:]) > 0.8
    assert sizes[0] < sizes[-1] <= sizes[0] + 3  # 12 slots, 8 and 4


def test_tasks_check_answers(tmp_path):
    """A task's checker and canvas; given tokens stay."""
    task = make_task("sudoku:box_rows=2,box_columns=2")
    example = task.example("train", 0)
    right, wrong = example.answer_ids.tolist(), example.answer_ids.copy()
    wrong[np.flatnonzero(example.targets)[0]] = 0
    assert task.partial(example, right) == 1 and task.partial(example, right[:0]) == 0
    assert task.partial(example, wrong.tolist()) == 1 - 1 / example.targets.sum()
    options = {"task": "sudoku", "box_rows": 2, "box_columns": 2}
    data = {"source": "evals.tasks:make_task", "length": 19, "options": options}
    fields = {name: x for name, x in model_fields().items() if name not in (*SPECIAL, "vocab_size")}
    rollout = {"sampler": "topk:k=8", "prompts": 2, "num_generations": 4, "reward": "partial"}
    run = run_of(config_of(tmp_path, data=data, model={"config": fields}, rollout=rollout))
    batch = run.feed(0, 0, run.initial_state())
    assert 0 <= run.feed.metrics["accuracy"] <= run.feed.metrics["reward"] <= 1 and run.feed.metrics["reward"] > 0
    for row in range(8):
        example = run.parts.rows.source.example(row // 4)
        given = np.asarray(example.given)
        assert (np.asarray(batch.tokens[0, row])[given] == example.answer_ids[given]).all()
        assert (np.asarray(batch.drawn[0, row]) == ~given).all()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A model of random weights with a tokenizer, and a file of questions; line 4 is too long for a row."""
    folder = tmp_path_factory.mktemp("spoken")
    ids = {"vocab_size": 517, "eos_id": 0, "pad_id": 0, "mask_id": 1, "end_ids": (0, 2), "bos_id": 3}
    config, files = LLADA.replace(**ids, max_length=64), copied_files(embedded.source("word-problems"))
    params = init_params(config, jax.random.key(0)).items()
    files |= checkpoint.generation_file({"cache": "dual", "block_length": 8})
    checkpoint.save(folder / "model", config, params, files=files)
    questions = [f"Q: {number} + 2?" for number in range(3)] + ["Q: " + "1 + " * 20 + "2?"]
    lines = [{"prompt": question, "target": "5", "split": "train"} for question in questions]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def of_questions(spoken, out, **changes):
    """A run on the questions of a file."""
    options = {"task": "text", "file": str(spoken / "questions.jsonl"), "score": "train_toys:even", "gen_length": 6}
    data = {"source": "evals.tasks:make_task", "length": 24, "on_bad": "drop", "options": options}
    model = {"init": str(spoken / "model"), "config": {}}
    rollout = {"sampler": "topk:k=2,proxy=entropy", "prompts": 2, "num_generations": 4}
    return config_of(out, data=data, model=model, rollout=rollout, **changes)


def test_questions_of_a_file_are_rewarded_by_their_score(spoken, tmp_path):
    """In the model's tokens; what does not fit with an answer is named before; the model is sampled as before."""
    config = of_questions(spoken, tmp_path / "run", steps=2)
    parts, (faults,) = read_parts(config).check_examples(config, progress=False)
    assert faults.kinds == {"too long": 1} and "questions.jsonl line 4" in faults.sentences[0]
    run = Run(config, parts, placement_of(config, parts.model, training_mesh(config)))
    batch, task = run.feed(0, 0, run.initial_state()), parts.task
    assert run.feed.metrics["reward"] == run.feed.metrics["accuracy"] and 0 < run.feed.metrics["reward"] < 1
    for row in range(8):
        example = parts.rows.source.example(parts.rows.index(row // 4))
        prompt, canvas = len(example.prompt_ids), np.asarray(batch.tokens[0, row])[len(example.prompt_ids) :]
        assert (
            task.show(batch.tokens[0, row, :prompt]) == example.problem.prompt and batch.lengths[0, row] == prompt + 6
        )
        right = task.verify(example, ends(canvas[:6].tolist(), parts.model)).correct
        assert np.sign(batch.advantage[0, row]) == (0 if batch.advantage[0, row] == 0 else 1 if right else -1)
    with pytest.warns(UserWarning, match="1 too long; they are left out"):
        train.train(config)
    trained = dllm_jax.load(tmp_path / "run" / "model")
    assert trained.generation == dllm_jax.load(spoken / "model").generation | {"gen_length": 6}


def ends(ids, config):
    """Tokens up to the first that ends an answer."""
    return list(itertools.takewhile(lambda token: token not in config.end_ids, ids))


def test_questions_without_room_or_references_get_a_sentence(spoken, tmp_path):
    with pytest.raises(DllmError, match="data.length 12 "):
        train.train(of_questions(spoken, tmp_path / "run", data__length=12))
    with pytest.raises(DllmError, match='"partial" counts tokens, and the task has texts'):
        train.train(of_questions(spoken, tmp_path / "run", rollout__reward="partial"))
    assert not (tmp_path / "run").exists()


MISTAKES = [
    ({"rollout__num_generations": 1}, "rollout.num_generations"),
    ({"rollout__temperature": 0.0}, "rollout.temperature"),
    ({"rollout__prompts": 3}, "rollout.prompts 3"),
    ({"objective": {"num_iterations": 4}}, "set it to 8"),
    ({"objective": {"epsilon_high": -0.1}}, "objective.epsilon_high"),
    ({"checkpoint__every": 3, "objective": {"num_iterations": 2}}, "checkpoint.every 3"),
    ({"lora": {"rank": 2, "dropout": 0.1}}, "lora.dropout"),
    ({"data__bucket": 4}, "data.bucket"),
    ({"objective": {"beta": 0.1}}, "objective.beta"),
    ({"rollout__reward": "partial"}, "rollout.reward"),
    ({"rollout__sampler": "topk:temperature=0.5"}, "temperature"),
    ({"rollout__sampler": "topk:top_p=0.9"}, "top_p"),
    ({"rollout__sampler": "topk:smoothing=true"}, "smoothing"),
    ({"rollout__sampler": "eb:gamma=2,fill_after_eos=true"}, "fill_after_eos"),
    ({"rollout__sampler": "edit"}, "rollout.sampler edit"),
    ({"rollout__sampler": "d2f:block_length=2"}, "rollout.sampler d2f"),
    ({"rollout__sampler": "nothing"}, "'nothing'"),
    ({"data__source": "train_toys:Reverse"}, "data.source"),
    ({"data__answer_length": 0}, "data.answer_length"),
]


@pytest.mark.parametrize(("changes", "name"), MISTAKES)
def test_bad_settings_get_a_sentence(tmp_path, changes, name):
    with pytest.raises(DllmError) as found:
        train.train(config_of(tmp_path / "run", **changes))
    assert name in str(found.value) and "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(DllmError, match="data.length 7"):
        train.train(config_of(tmp_path / "run", data__length=7))


def test_a_reward_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(Liked, "reward", lambda *_: float("nan"))
    with pytest.raises(DllmError, match="the reward of an answer is nan; give finite numbers"):
        train.train(config_of(tmp_path / "run"))


def test_one_command(tmp_path, capsys):
    path = write_toml(tmp_path / "run.toml", table(tmp_path / "run", steps=2))
    assert main(["grpo", "--config", str(path), "--no-progress"]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert dllm_jax.load(tmp_path / "run" / "model").config.mask_id == MASK
    assert build_settings(GrpoConfig, read_settings(tmp_path / "run")).objective == GrpoPart()
