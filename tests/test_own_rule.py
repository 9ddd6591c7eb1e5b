"""The kit for rules: every registered rule passes with every cache policy, and what is broken is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import DllmError
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
CHECKS = ["tracing", "a row alone", "numbers per row"]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_its_promises_with_every_cache(name):
    """A rule that cannot be made without numbers gets them in `NEEDED`."""
    missing = [field.name for field in dataclasses.fields(RULES[name]) if field.default is dataclasses.MISSING]
    assert name in NEEDED or not missing, f"add {name} to NEEDED in this file, with {missing}"
    rule = NEEDED[name]() if name in NEEDED else RULES[name]()
    assert check_rule(rule) == (CHECKS if numbers_of(rule) else CHECKS[:2]) + CACHES


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


BROKEN = {
    Undecorated(): "a Undecorated is no pytree; decorate its class with dllm_jax.pytree.pytree",
    Branching(): "Branching with cache 'none' cannot be traced (.*); its methods are traced, so no Python `if` on arr",
    Overwriting(): "position .* of row .*, was final, and is changed; commit undecided positions alone, or set revises",
    Reopening(): r"position . of row ., whose forwards are \d+, was final, and is changed$",
    Curious(): "a row is another beside other rows: at row .* is .*, not",
    OneNumber(): r"cannot be traced \(.*\); a number may be \[B\], so use per_row",
    Idle(): "Idle with cache 'none' has not ended after 320 forwards; bound them by most_steps",
    Understated(): "row 0 took 2. forwards, but forwards says at most 16; correct most_steps, or forwards",
    Drawing(): "the compiled loop gives another result than its steps one by one: at row",
    Forgetting(): r"its state is int32\[3\] by init and float32\[3\] after a step; both must be alike",
}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: type(rule).__name__)
def test_what_is_broken_is_named(rule):
    with pytest.raises(AssertionError, match=BROKEN[rule]) as caught:
        check_rule(rule, caches=("none",))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(DllmError, match="threshold is -1; it must be"):
        check_rule(Threshold(-1.0))
    with pytest.raises(DllmError, match="no cache policy is called 'big'; choose one of none, prefix"):
        check_rule(Threshold(), caches=("big",))
    with pytest.raises(DllmError, match="steps 5 is not a multiple of the 4 blocks"):
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
    "name, sentence",
    [
        ("no_rules:Lead", "rule 'no_rules:Lead' cannot be imported (No module named 'no_rules'); write it like module"),
        ("broken_rules:Lead", "cannot be imported (No module named 'no_such_module')"),
        ("own_rules:Led", "rule 'own_rules:Led' cannot be imported (module 'own_rules' has no attribute 'Led')"),
        ("own_rules:function", "rule 'own_rules:function' is no unmasking rule; derive its class from samplers.Rule"),
        ("own_rules:Often", "rule 'own_rules:Often' is no unmasking rule; derive"),
        ("own_rules:Plain", "rule 'own_rules:Plain' is no pytree; decorate its class with dllm_jax.pytree.pytree"),
        ("own_rules:Lead:led=1", "sampler own_rules:Lead has no option 'led'; did you mean 'lead'?"),
        ("threshold:treshold", "'treshold' is no option; write it as option=value"),
        ("treshold", "no unmasking rule or preset is called 'treshold'; did you mean 'threshold'? Choose one of"),
    ],
)
def test_what_is_no_rule_is_said(own, llada_tiny, name, sentence):
    with pytest.raises(DllmError) as caught:
        make_sampler(llada_tiny, name)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_may_not_name_code(own, llada_tiny):
    for said in ({"rule": "own_rules:Lead"}, {"cache": "own_rules:Often"}, {"sampler": "own_rules:Lead"}):
        with pytest.raises(DllmError, match=r"generation.json of .* is other code, which a checkpoint may not name"):
            make_sampler(dataclasses.replace(llada_tiny, generation=said))


def test_the_shell_knows_it(own, llada_tiny, capsys):
    model = ["--model", str(llada_tiny.folder), "--gen-length", "16", "--block-length", "8"]
    for line in (["--rule", "own_rules:Lead", "--lead", "0.25"], ["--sampler", "own_rules:Lead:lead=0.25"]):
        assert cli.main(["--explain", *line, *model]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "rule own_rules:Lead the command line" in text and "lead 0.25 the command line" in text
    assert cli.main(["--explain", "--rule=own_rules:Lead", *model]) == 0
    assert "lead 0.8 default of own_rules:Lead" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["--list", "--rule", "own_rules:Lead", "--cache", "own_rules:Often"]) == 0
    listed = capsys.readouterr().out
    assert "own_rules:Lead: Commits what is far enough ahead." in listed and "--lead (default: 0.8)" in listed
    assert "own_rules:Often: " in listed
    assert cli.main(["a", "--rule", "no_rules:Lead", *model]) == 2
    assert capsys.readouterr().err.startswith("error: rule 'no_rules:Lead' cannot be imported")
