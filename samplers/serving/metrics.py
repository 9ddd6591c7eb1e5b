"""Metrics for Prometheus, without any text of clients."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from samplers.decisions.answers import Decision
from samplers.engine.engine import Engine, Stats
from samplers.engine.requests import Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ANSWER = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine, compiling: Callable[[], bool]) -> None:
        """
        Args:
            compiling: whether a program is being compiled, of this engine or another.
        """
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("dllm_requests", "Requests by outcome", ["route", "outcome"], registry=registry)
        self._tokens = Counter(
            "dllm_tokens",
            "Tokens of prompts, those of them that were not read again, and of answers",
            ["kind"],
            registry=registry,
        )
        self._forwards = Counter("dllm_forwards", "Forwards of single requests", registry=registry)
        self._steps = Counter("dllm_steps", "Steps, each a forward of all slots in use", registry=registry)
        self._busy = Gauge("dllm_slots_busy", "Slots in use", registry=registry)
        self._waiting = Gauge("dllm_queue_length", "Requests that wait for a slot", registry=registry)
        self._step_seconds = Histogram("dllm_step_seconds", "Time of a step", buckets=_STEP, registry=registry)
        self._answer_seconds = Histogram(
            "dllm_last_token_seconds", "Time from a request to its last token", buckets=_ANSWER, registry=registry
        )
        Gauge("dllm_slots", "Slots of the engine", registry=registry).set(engine.slots)
        rows = Gauge("dllm_rows", "Rows of the program that ran last", registry=registry)
        rows.set_function(lambda: engine.rows)
        about = "Whether a program of another size is being compiled"
        Gauge("dllm_compiling", about, registry=registry).set_function(compiling)

    def count_steps(self, stats: Stats, busy: int, waiting: int) -> None:
        """Counts the steps of an engine call; after it `busy` slots are in use and `waiting` requests wait."""
        self._busy.set(busy)
        self._waiting.set(waiting)
        self._steps.inc(stats.steps)
        for _ in range(stats.steps):
            self._step_seconds.observe(stats.seconds / stats.steps)

    def count_answer(self, request: Request, seconds: float) -> None:
        """Counts a request that has ended."""
        assert request.result is not None
        self._tokens.labels("prompt").inc(len(request.prompt))
        self._tokens.labels("cached").inc(request.cached)
        self._tokens.labels("completion").inc(int(request.result.lengths[0]))
        self._forwards.inc(int(request.result.nfe[0]))
        self._answer_seconds.observe(seconds)

    def count_decision(self, decision: Decision, seconds: float) -> None:
        """Counts a decision."""
        self._tokens.labels("prompt").inc(decision.prompt_tokens)
        self._forwards.inc(decision.nfe)
        self._answer_seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        return generate_latest(self._registry)
