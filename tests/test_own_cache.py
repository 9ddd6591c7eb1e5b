"""The kit for cache policies: every registered one passes, and what is broken is named."""

import jax.numpy as jnp
import pytest
from conftest import refuses

from dllm_jax.pytree import pytree
from samplers import CACHES, DualCache, ExactCache, NoCache
from samplers.testing import check_cache

EXACT = ("none", "exact")
USUAL = ["threshold", "edit", "smoothing", "threshold, shifted"]
RAN = {"exact": USUAL[:3], "sub-block": USUAL[:2]}


@pytest.mark.parametrize("name", CACHES)
def test_every_policy_keeps_its_promises(name):
    assert check_cache(CACHES[name](), exact=name in EXACT) == RAN.get(name, USUAL)


class Undecorated(NoCache):
    pass


class Empty:
    pass


@pytree()
class Forgetful(DualCache):
    """Never rebuilds anything."""

    def stale(self, request, state):
        return request.active & False


@pytree()
class Sociable(DualCache):
    """Rebuilds all rows where one is stale."""

    def stale(self, request, state):
        return request.active & super().stale(request, state).any()


@pytree()
class Branching(DualCache):
    def stale(self, request, state):
        return request.active if request.nfe.max() > 1 else super().stale(request, state)


@pytree()
class Telling(NoCache):
    """What the others tell otherwise."""

    def told(self, request, outcome):
        return outcome

    def predict(self, denoiser, request, state):
        return self.told(request, super().predict(denoiser, request, state))


@pytree()
class OneOff(Telling):
    def told(self, request, outcome):
        return outcome._replace(hidden=jnp.roll(outcome.hidden, 1, axis=1))


@pytree()
class Half(Telling):
    def told(self, request, outcome):
        return outcome._replace(high=outcome.high * 0 + request.block_start + 2)


@pytree()
class Late(Telling):
    def told(self, request, outcome):
        return outcome._replace(full=outcome.full | True)


@pytree()
class Boasting(Telling):
    def told(self, request, outcome):
        return outcome._replace(full=outcome.full & (request.nfe == 0), updated=request.active)


@pytree()
class Growing(NoCache):
    """Whose state changes its type."""

    def init(self, denoiser, batch, length):
        return jnp.zeros((batch,), jnp.int32)

    def predict(self, denoiser, request, state):
        return super().predict(denoiser, request, ())._replace(state=state + 0.5)


BROKEN = {  # what the sentence has
    Undecorated(): "pytree",
    Empty(): "BlockCache",
    DualCache: "init and predict",
    Forgetful(): "full",
    Sociable(): "other rows",
    Branching(): "Python `if`",
    OneOff(): "hidden states",
    Half(): "active block",
    Late(): "ended",
    Boasting(): "keys and values",
    Growing(): "float32[3]",
}


@pytest.mark.parametrize("policy", BROKEN, ids=lambda policy: getattr(policy, "__name__", type(policy).__name__))
def test_what_is_broken_is_named(policy):
    with refuses(BROKEN[policy], kind=AssertionError):
        check_cache(policy)


def test_an_approximation_is_not_exact():
    with refuses("DualCache", "no cache", kind=AssertionError):
        check_cache(DualCache(), exact=True)


def test_what_cannot_be_checked_is_refused():
    with refuses("refresh_every"):
        check_cache(DualCache(0))
    with refuses("exact cache"):
        check_cache(Plain())


@pytree()
class Plain(ExactCache):
    in_order = False
