"""Running a call after the decision, eagerly or inside a capture.

`Execution.run` is the room; a runner's step (`ubatch.wrapping.step`) enters it as it is. A call of the wrapper comes in
(`Execution.call`) in one of three ways:

    lanes      one body per lane, one forward context per lane, the outputs merged
    single     the module itself as the only lane: its chunks of experts overlap (single-batch overlap)
    unsplit    the module itself, with a context that has every rank's tokens
"""

import contextvars
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ubatch.calls.call_plan import Call
from ubatch.calls.outputs import Guess
from ubatch.errors import ConfigError
from ubatch.lanes.context import current_lane, transfers_end_within
from ubatch.lanes.workers import LanePool, SingleLane
from ubatch.process.interrupts import Marks
from ubatch.ranks.fsdp import sharing_weights
from ubatch.ranks.long_calls import taking_long
from ubatch.schedules.forward_context import ForwardContext, set_forward_context
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, Offer, decide
from ubatch.streams.graph_protocols import Capture
from ubatch.streams.streams import make_streams
from ubatch.trace.recorder import profile_ranges
from ubatch.trace.spans import UNSPLIT, SpanKind, Trace, current_trace
from ubatch.wrapping.config import UBatchConfig
from ubatch.wrapping.guard import Guard
from ubatch.wrapping.step import DecidedStep, Step


class Execution:
    """Runs one module, and keeps its lanes.

    Args:
        device: where the module runs; None: where its parameters are.
        intercept: overlapped calls run under `ubatch.ranks.intercept.intercepting`.

    Attributes:
        pools: (number of lanes, device) -> the lanes.
        failure: the lane that failed in the last run, and the last point it had passed; None if none did.
    """

    def __init__(
        self, model: nn.Module, config: UBatchConfig, device: torch.device | None, *, intercept: bool = False
    ) -> None:
        self.model = model
        self.config = config
        self._device = device
        self._intercept = intercept
        self.pools: dict[tuple[int, torch.device], LanePool | SingleLane] = {}
        self._voted = frozenset(() if config.group is None else config.group.ranks)
        self._patient = Marks()
        self.failure: tuple[int, str] | None = None

    def call(self, step: Step, capture: Capture | None = None, guard: Guard | None = None) -> Any:
        """Run a call as it was decided; outputs of lanes are merged. If the ranks voted, the forward context of a call
        without lanes has their decision.

        Raises:
            ConfigError: `context` has slices, but no matching lane contexts.
            Finding: `guard` found a change.
            Others: what the lanes raised; see `LanePool.run`.
        """
        intent = step.intent
        engaged = intent.engages(step.decision)
        if intent.single or not engaged:
            voted = self.config.group is not None and (step.context is None or step.context.decision is None)
            contexts = [self._whole_context(step)] if voted or engaged else []
            schedule = intent.schedule if engaged else None
            return self.run(_decided(step, [(step.args, step.kwargs)], contexts, schedule), capture)[0]
        outputs = self.outputs(step, capture, None if guard is None else guard.at_handover)
        if guard is not None:
            guard.check()
        with nullcontext() if capture is None else capture.part():
            rule = intent.rule or Guess(self.config.output_dims)
            merged = rule.merge("output", outputs, intent.parts)
            intent.parts.merge_caches()
            return merged

    def outputs(
        self, step: Step, capture: Capture | None = None, at_handover: Callable[[], None] | None = None
    ) -> list[Any]:
        """Run a call in lanes; returns one output per lane. Each lane runs `at_handover` before it hands over and when
        it has its output. Errors as in `call`."""
        intent = step.intent
        return self.run(_decided(step, intent.calls, _lane_contexts(step), intent.schedule), capture, at_handover)

    def run(
        self, step: DecidedStep, capture: Capture | None = None, at_handover: Callable[[], None] | None = None
    ) -> list[Any]:
        """Run a step: in lanes, as the only lane, or unsplit. Returns one output per call of the step; the other
        arguments, and errors, are those of `outputs`."""
        self.failure = None
        if step.schedule is None:
            return [self._whole(step, capture)]
        model = self.model if at_handover is None else functools.partial(_watched, self.model, at_handover)
        bodies = [functools.partial(model, *args, **kwargs) for args, kwargs in step.calls]
        pool = self._pool(len(bodies))
        try:  # keeps a lane's context variables out of the caller's, also if the lane runs in this thread
            context = contextvars.copy_context()
            return context.run(self._run_in, pool, bodies, step.schedule, step.contexts, self._voted, capture)
        finally:
            self.failure = pool.failure

    def _run_in(self, pool: LanePool | SingleLane, *step: Any) -> list[Any]:
        with profile_ranges(self.config.profile_ranges), self._intercepting(), sharing_weights():
            return pool.run(*step, patient=bool(self._patient))

    def _whole(self, step: DecidedStep, capture: Capture | None) -> Any:
        """Run a step's only call without lanes, under its context if it has one."""
        ((args, kwargs),) = step.calls
        around = set_forward_context(step.contexts[0]) if step.contexts else _NO_SPAN
        patient = bool(self._patient) or capture is not None
        with around, transfers_end_within(None if patient else self.config.timeout_s), span("unsplit"):
            if capture is None:
                return self.model(*args, **kwargs)
            capture.begin()
            with capture.part():
                return self.model(*args, **kwargs)

    def _intercepting(self) -> AbstractContextManager[None]:
        if not self._intercept:
            return nullcontext()
        from ubatch.ranks.intercept import intercepting  # some builds of torch lack torch.distributed

        return intercepting()

    def _whole_context(self, step: Step) -> ForwardContext:
        """The forward context of an unsplit call: the caller's, with the ranks' decision."""
        base = step.context or ForwardContext(num_tokens=step.intent.num_tokens, mode=step.intent.mode)
        if self.config.group is None or base.decision is not None:
            return base
        across = step.decision.lane_tokens(0) if base.tokens_across_ranks is None else base.tokens_across_ranks
        return replace(base, tokens_across_ranks=across, decision=step.decision)

    def vote(self, offer: Offer) -> Decision:
        """The ranks' decision on a step; without a group, that of this rank alone."""
        group = self.config.group
        return _decide_alone(offer) if group is None else group.vote(offer)

    @contextmanager
    def no_timeout(self) -> Iterator[None]:
        """Suspend the hang check in the `with` block, and make peers wait for this rank."""
        with self._patient.marked(), taking_long("warming up"):
            yield

    def close(self) -> None:
        """Stop the lanes' threads."""
        for pool in self.pools.values():
            pool.close()

    def _pool(self, lanes: int) -> LanePool | SingleLane:
        device = self._device
        if device is None:  # the module may have moved since the last call
            device = device_of(self.model)
        pool, limit = self.pools.get((lanes, device)), self.config.timeout_s
        if pool is None:
            pool = SingleLane(device, timeout_s=limit) if lanes == 1 else LanePool(lanes, device, limit)
            self.pools[lanes, device] = pool
        return pool


@functools.lru_cache(1024)
def _decide_alone(offer: Offer) -> Decision:
    return decide([offer])


def device_of(model: nn.Module) -> torch.device:
    """Device of a module's first parameter or buffer; the CPU if it has none."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def checked_device(device: torch.device | str) -> torch.device:
    """A device that lanes can run on.

    Raises:
        ConfigError: lanes cannot run on it.
    """
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is no torch device. Use 'cpu' or 'cuda'.") from error
    make_streams(checked)
    return checked


def _watched(model: nn.Module, at_handover: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    lane = current_lane()
    if lane is not None:
        lane.at_handover = at_handover
    result = model(*args, **kwargs)
    at_handover()
    return result


def _decided(
    step: Step, calls: Sequence[Call], contexts: Sequence[ForwardContext], schedule: Schedule | None
) -> DecidedStep:
    return DecidedStep(mode=step.intent.mode, decision=step.decision, schedule=schedule, calls=calls, contexts=contexts)


def _lane_contexts(step: Step) -> list[ForwardContext]:
    tokens, decision, context = step.intent.offer.tokens, step.decision, step.context
    if context is not None and context.lane_contexts is not None:
        lanes, given = len(tokens), len(context.lane_contexts)
        if given != lanes:
            raise ConfigError(f"{lanes} ubatch_slices need as many lane_contexts, not {given}.")
        return list(context.lane_contexts)
    if context is not None and context.attn_metadata is not None:
        raise ConfigError("a forward context with ubatch_slices and attn_metadata needs lane_contexts, one per slice.")
    make = functools.partial(ForwardContext, mode=step.intent.mode, decision=decision)
    return [make(num_tokens=own, tokens_across_ranks=decision.lane_tokens(lane)) for lane, own in enumerate(tokens)]


def span(name: str) -> AbstractContextManager[None]:
    """Trace the `with` block as compute outside of lanes."""
    trace = current_trace()
    return _NO_SPAN if trace is None else _traced(trace, name)


_NO_SPAN = nullcontext()


@contextmanager
def _traced(trace: Trace, name: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        trace.add(SpanKind.COMPUTE, name, UNSPLIT, start, time.monotonic())
