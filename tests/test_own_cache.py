"""The kit for cache policies: every registered one passes, and what is broken is named."""

import jax.numpy as jnp
import pytest

from dllm_jax import DllmError
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
class Nowhere(Telling):
    def told(self, request, outcome):
        return outcome._replace(hidden=outcome.hidden * jnp.nan)


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


BROKEN = {
    Undecorated(): "a Undecorated is no pytree; decorate its class with dllm_jax.pytree.pytree",
    Empty(): "a Empty is no cache policy; give it init and predict, or derive its class from BlockCache",
    DualCache: "a .* is no cache policy; give it init and predict",
    Forgetful(): "Forgetful with threshold: forward 0 of row 0 is its first, but no full one; nothing is stored",
    Sociable(): "Sociable with threshold: a row is another beside other rows: at row .*, not",
    Branching(): r"Branching with threshold cannot be traced \(.*\); its methods are traced, so no Python `if`",
    OneOff(): "OneOff with threshold: forward 0 of row 0 counts as a full one, but gives other hidden states",
    Nowhere(): "Nowhere with threshold: forward 0 of row 0 counts as a full one, but gives other hidden states",
    Half(): "Half with threshold: forward 0 of row 0 runs a part of the active block alone",
    Late(): "Late with threshold: forward .* of row . is told of a row that has ended",
    Boasting(): "Boasting with threshold: forward 1 of row . counts as one that stored all keys and values",
    Growing(): r"Growing with threshold: its state is int32\[3\] by init and float32\[3\] after a step",
}


@pytest.mark.parametrize("policy", BROKEN, ids=lambda policy: getattr(policy, "__name__", type(policy).__name__))
def test_what_is_broken_is_named(policy):
    with pytest.raises(AssertionError, match=BROKEN[policy]) as caught:
        check_cache(policy)
    assert "\n" not in str(caught.value)


def test_an_approximation_is_not_exact():
    with pytest.raises(AssertionError, match="DualCache with threshold: it gives another result than no cache: at row"):
        check_cache(DualCache(), exact=True)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(DllmError, match="refresh_every"):
        check_cache(DualCache(0))
    with pytest.raises(DllmError, match="exact cache is for block diffusion models"):
        check_cache(Plain())


@pytree()
class Plain(ExactCache):
    in_order = False
