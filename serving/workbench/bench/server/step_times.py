"""Where an engine's steps spend their time, by kind of work: for `ubatch bench step`.

Nothing is sampled: while steps are timed, the functions of `_BOUNDARIES` are replaced by ones that look at the clock
when they begin and end. A moment counts for the function that began last and has not ended, so kinds do not overlap,
and add up to the step; what is in none is `OTHER`. Within a kind that is no container (see `_CONTAINERS`), inner
boundaries do not count: the gate's product is the router's.

A decode step may repeat recorded kernel calls (`model_runner.decoder.repeated`), without the functions around them. If
it is recorded while steps are timed, its calls carry their clock, and count for the kind that recorded them; the Python
that repeats them is `OTHER`. So a model should be recorded either timed or not: use an engine for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial, wraps
from typing import Any

from model_runner import step_runner
from model_runner.decoder import decoder, latent_attention, layers, rope, scatter, sparse_mlp
from model_runner.pending_step import PendingStep
from moe import FusedMoEModularKernel
from serving.engine.rank.core import EngineCore
from serving.scheduler import Scheduler
from ubatch.kernels import Recording


class Kind(StrEnum):
    """A kind of work; its value is the name in tables."""

    ATTENTION = "attention"
    PROJECTIONS = "projections"
    EXPERTS = "experts"
    ROUTER = "gate, router"
    SMALL = "embedding, norms, rope"
    LOGITS = "logits"
    SAMPLING = "sampling"
    BATCH = "batch, vote, plan"
    SCHEDULING = "scheduling"
    OTHER = "other"
    """Python between the others, and small operators of torch"""


_CONTAINERS = (Kind.OTHER, Kind.ATTENTION, Kind.EXPERTS)
_BOUNDARIES: tuple[tuple[Kind, Any, tuple[str, ...]], ...] = (
    (Kind.ATTENTION, layers.Attention, ("forward",)),
    (Kind.ATTENTION, latent_attention.LatentAttention, ("forward",)),
    (Kind.PROJECTIONS, layers.Projection, ("forward",)),
    (Kind.EXPERTS, FusedMoEModularKernel, ("forward",)),
    (Kind.ROUTER, layers.Projection, ("scores",)),  # logits' is within theirs
    (Kind.ROUTER, sparse_mlp, ("route",)),
    (Kind.SMALL, layers.Projection, ("rows",)),
    (Kind.SMALL, rope.RotaryEmbedding, ("forward",)),
    (Kind.SMALL, rope.RotaryTable, ("forward",)),
    (Kind.SMALL, scatter, ("add_norm",)),
    (Kind.SMALL, layers, ("normalise_and_rotate", "silu_mul")),
    (Kind.SMALL, latent_attention, ("rms_norm",)),
    (Kind.LOGITS, decoder.DecoderLM, ("compute_logits",)),
    (Kind.SAMPLING, PendingStep, ("sample", "result")),
    (Kind.BATCH, step_runner, ("build_input_batch", "plan_step")),
    (Kind.BATCH, step_runner.StepRunner, ("agree",)),
    (Kind.SCHEDULING, Scheduler, ("schedule", "advance", "process")),
)


class Stopwatch:
    """Times the steps of the engines in this process that run in the caller's thread."""

    def __init__(self) -> None:
        self._steps: list[Mapping[Kind, float]] = []
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._kinds = [Kind.OTHER]
        self._since = 0.0

    @contextmanager
    def steps(self, *, split: bool) -> Iterator[list[Mapping[Kind, float]]]:
        """Time what `LLM.generate` runs in the `with` block: a list that has the seconds of every step afterwards.

        Args:
            split: by kind of work; else all is `OTHER`, and nothing but the begin of a step is looked at.
        """
        self._steps, found = [], list[Mapping[Kind, float]]()
        with ExitStack() as stack:
            for name in ("step", "drain"):  # the loop over steps ends with a drain
                stack.enter_context(_replaced(EngineCore, name, self._beginning))
            if split:
                for kind, owner, names in _BOUNDARIES:
                    for name in names:
                        stack.enter_context(_replaced(owner, name, partial(self.timed, kind)))
                stack.enter_context(_replaced(Recording, "note", self._noting))
            yield found
        found += self._steps[1:]  # the first is what was before the steps

    def timed(self, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `kind`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._kinds[-1] not in _CONTAINERS:
                return function(*args, **kwargs)
            self._charge()
            self._kinds.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._kinds.pop()

        return run

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._kinds[-1]] += now - self._since
        self._since = now

    def _beginning(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any) -> Any:
            self._charge()
            self._steps.append(self._seconds)
            self._seconds = dict.fromkeys(Kind, 0.0)
            return step(*args)

        return run

    def _noting(self, note: Callable[..., None]) -> Callable[..., None]:
        """The kernel's call is recorded with a clock of its own."""

        def run(recording: Recording, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            kind = self._kinds[-1]

            def call(*args: Any) -> None:
                self._charge()
                function(*args)
                now = time.perf_counter()
                self._seconds[kind] += now - self._since
                self._since = now

            note(recording, call, arguments)

        return run


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """The attribute of a class or module, changed within the block."""
    before = vars(owner)[name]
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
