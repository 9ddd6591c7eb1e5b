"""The kit for rules: every registered rule passes with every cache policy, and what is broken is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_error, refuses

from dllm_jax.indicator import IndicatorConfig, init_indicator
from dllm_jax.pytree import pytree
from samplers import (
    NI,
    RULES,
    Dream,
    LLaDA,
    Remask,
    Rule,
    Threshold,
    generate,
    make_sampler,
    parse_sampler,
    parse_samplers,
)
from samplers.cli import sample as cli
from samplers.config.registry import settings_of, title
from samplers.engine.program import numbers_of
from samplers.rules.base import per_row
from samplers.testing import TINY, check_rule


def indicator():
    sizes = {"hidden_dim": TINY.embed_dim, "embed_dim": TINY.embed_dim, "num_values": 4, "num_tokens": 2}
    return init_indicator(IndicatorConfig(depth=1, width=8, **sizes), jax.random.key(1))


NEEDED = {  # rules with numbers that have no default
    "llada": lambda: LLaDA(8),
    "dream": lambda: Dream(8),
    "ni": lambda: NI(indicator(), 0.6, 0.5),
    "remask": lambda: Remask(8),
}
CACHES = ["none", "prefix", "dual", "vicinity", "exact", "sub-block"]
# Known to commit by predictions alone, whatever cache made these: checked without and with one. A new rule gets all.
WITH_ONE = ("llada", "dream", "topk", "factor", "eb", "credit", "hierarchical", "dynamic", "fast-dllm-v2")
CHECKS = ["tracing", "a row alone", "numbers per row"]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_its_promises(name):
    """A rule that cannot be made without numbers gets them in `NEEDED`."""
    caches = ["none", CACHES[1 + WITH_ONE.index(name) % 5]] if name in WITH_ONE else CACHES
    missing = [field.name for field in dataclasses.fields(RULES[name]) if field.default is dataclasses.MISSING]
    assert name in NEEDED or not missing, f"add {name} to NEEDED in this file, with {missing}"
    rule = NEEDED[name]() if name in NEEDED else RULES[name]()
    key = jax.random.key(1)  # without two positions of equal scores, which programs round differently
    assert check_rule(rule, caches=caches, key=key) == (CHECKS if numbers_of(rule) else CHECKS[:2]) + caches


# Broken ones ---------------------------------------------------------------------------------------------------------


@pytree()
class Sure(Rule):
    """What the others break."""

    bound: float | jax.Array = 0.5

    def decide(self, predictions, view, state):
        return view.undecided & (predictions.confidence >= per_row(self.bound)), state


class Undecorated(Rule):
    pass


@pytree()
class Branching(Sure):
    def decide(self, predictions, view, state):
        return (view.undecided if predictions.confidence.max() > 0.5 else ~view.undecided), state


@pytree()
class Overwriting(Sure):
    def decide(self, predictions, view, state):
        return predictions.confidence >= per_row(self.bound), state


@pytree()
class Reopening(Sure):
    revises = True

    def change(self, predictions, view, state):
        change, state = super().change(predictions, view, state)
        return change._replace(undecided=change.undecided | (view.step[:, None] == 1)), state

    def most_steps(self, view):
        return view.block_undecided + 3


@pytree()
class Curious(Sure):
    """Looks at the other rows."""

    def decide(self, predictions, view, state):
        return view.undecided & (predictions.confidence >= predictions.confidence.mean()), state


@pytree()
class OneNumber(Sure):
    def decide(self, predictions, view, state):
        return view.undecided & (predictions.confidence >= self.bound), state


@pytree()
class Idle(Sure):
    def decide(self, predictions, view, state):
        return view.undecided & False, state

    def most_steps(self, view):
        return view.block_undecided + 10**6


@pytree()
class Understated(Idle):
    def most_steps(self, view):
        return view.block_undecided + 2

    def forwards(self, undecided, num_blocks):
        return 1, undecided


@pytree()
class Drawing(Sure):
    """Random numbers that are not of a key."""

    def decide(self, predictions, view, state):
        return view.undecided & (np.random.default_rng().random(view.undecided.shape) < 0.5), state


@pytree()
class Forgetting(Sure):
    """Whose state changes its type."""

    def init(self, batch, width, vocab_size):
        return jnp.zeros((batch,), jnp.int32)

    def decide(self, predictions, view, state):
        return view.undecided, state + 0.5


BROKEN = {  # what the sentence has
    Undecorated(): "pytree",
    Branching(): "Python `if`",
    Overwriting(): "final",
    Reopening(): "final",
    Curious(): "other rows",
    OneNumber(): "per_row",
    Idle(): "most_steps",
    Understated(): "forwards",
    Drawing(): "compiled loop",
    Forgetting(): "float32[3]",
}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: type(rule).__name__)
def test_what_is_broken_is_named(rule):
    with refuses(BROKEN[rule], kind=AssertionError):
        check_rule(rule, caches=("none",))


def test_what_cannot_be_checked_is_refused():
    with refuses("threshold"):
        check_rule(Threshold(-1.0))
    with refuses("'big'"):
        check_rule(Threshold(), caches=("big",))
    with refuses("steps 5"):
        check_rule(LLaDA(5))


# By name -------------------------------------------------------------------------------------------------------------

OWN = """
import jax
from dllm_jax.pytree import pytree
from samplers import DualCache, Rule
from samplers.rules.base import per_row

@pytree()
class Lead(Rule):
    '''Commits what is far enough ahead.

    Attributes:
        lead: over the second best. Default: a guess.
    '''

    lead: float | jax.Array = 0.8

    def decide(self, predictions, view, state):
        return view.undecided & (predictions.margin >= per_row(self.lead)), state

@pytree()
class Often(DualCache):
    often: int = 1

class Plain(Rule):
    pass

def function():
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of somebody's own."""
    (tmp_path / "own_rules.py").write_text(OWN)
    (tmp_path / "broken_rules.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_rule_of_ones_own_has_a_name(own, llada_tiny):
    spec = parse_sampler("own_rules:Lead:lead=0.5,cache=own_rules:Often,often=2")
    assert (spec.name, spec.options) == ("own_rules:Lead", {"lead": 0.5, "cache": "own_rules:Often", "often": 2})
    assert parse_sampler(str(spec)) == spec and spec.series == "own_rules:Lead:cache=own_rules:Often,often=2"
    sampler = make_sampler(llada_tiny, str(spec), gen_length=16, block_length=8)
    assert settings_of(sampler.rule) == {"name": "own_rules:Lead", "lead": 0.5} and sampler.cache.often == 2
    assert title(sampler) == "lead=0.5 × often=2"
    for options in ({"rule": "own_rules:Lead", "lead": 0.3}, {"sampler": "own_rules:Lead:lead=0.3"}):
        assert generate(llada_tiny, "Q: 1", gen_length=16, block_length=8, cache="none", **options).nfe <= 16
    assert make_sampler(llada_tiny, "d2f", rule="own_rules:Lead", lead=0.4, gen_length=32).rule.lead == 0.4
    several = parse_samplers("own_rules:Lead:lead=0.5|0.9")
    assert [one.options["lead"] for one in several] == [0.5, 0.9] and len({one.series for one in several}) == 1
    assert parse_sampler("own_rules:Lead@somewhere").model == "somewhere"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("no_rules:Lead", "'no_rules'"),
        ("broken_rules:Lead", "'no_such_module'"),
        ("own_rules:Led", "'Led'"),
        ("own_rules:function", "'own_rules:function'"),
        ("own_rules:Often", "'own_rules:Often'"),
        ("own_rules:Plain", "pytree"),
        ("own_rules:Lead:led=1", "did you mean 'lead'"),
        ("threshold:treshold", "'treshold'"),
        ("treshold", "did you mean 'threshold'"),
    ],
)
def test_what_is_no_rule_is_said(own, llada_tiny, spec, name):
    with refuses(name):
        make_sampler(llada_tiny, spec)


def test_a_checkpoint_may_not_name_code(own, llada_tiny):
    for said in ({"rule": "own_rules:Lead"}, {"cache": "own_rules:Often"}, {"sampler": "own_rules:Lead"}):
        with refuses("generation.json", "own_rules:"):
            make_sampler(dataclasses.replace(llada_tiny, generation=said))


def test_the_shell_knows_it(own, llada_tiny, capsys):
    model = ["--model", str(llada_tiny.folder), "--gen-length", "16", "--block-length", "8"]
    assert cli.main(["--explain", "--sampler", "own_rules:Lead:lead=0.25,cache=own_rules:Often", *model]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rule own_rules:Lead the command line" in text and "lead 0.25 the command line" in text
    assert "cache own_rules:Often the command line" in text and "often 1 default of own_rules:Often" in text
    assert cli.main(["--explain", "--rule=own_rules:Lead", *model]) == 0
    assert "lead 0.8 default of own_rules:Lead" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["a", "--rule", "no_rules:Lead", *model]) == 2
    assert "'no_rules:Lead'" in one_error(capsys)
