"""A module and everything needed to overlap its calls: eligibility, lanes, graphs, counts. Held by `UBatchWrapper`.

A call, in pseudo-code:
    refuse to run inside a lane, or while another call runs
    if this call may be split and is big enough, cut it            -> an offer: yes, no (reason), idle; proved or not
    several ranks: vote                                          -> the same decision on all of them
    captured on all ranks: replay its graph
    no:   count the reason, run the module as it is
    yes, unproved: run the module as it is, then in lanes on copies, and compare (`ubatch.wrapping.proof`)
    yes:  run the module once per lane, merge the outputs
          (single-batch overlap: run the module as it is, as the only lane)
    on any error: tell the peers, raise the original

A runner of this project has voted and knows its slices. It comes in by a door of its own, `run`, behind all of this.

`ubatch.wrapping.eligibility` decides whether to split, `ubatch.wrapping.execution` runs a call, `ubatch.graphs.table`
finds its graph.
"""

import functools
import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from ubatch.calls.arguments import check_split_dims
from ubatch.calls.call_plan import CannotSplit
from ubatch.calls.merging import OtherValue
from ubatch.errors import (
    ConcurrentCallError,
    ConfigError,
    ForkedLaneError,
    NestedUBatchError,
    OverlapDeclined,
    SideEffectError,
    UBatchError,
    describe,
    note,
)
from ubatch.graphs.capture import CaptureFailed, Capturer
from ubatch.graphs.cuda import CudaGraphs
from ubatch.graphs.table import GraphTable, Hit
from ubatch.lanes.ambient import why_not_in_lanes
from ubatch.lanes.context import current_lane
from ubatch.process.interrupts import Claim, Claims, apart
from ubatch.ranks.group import CommGroup
from ubatch.schedules.forward_context import ForwardContext, get_forward_context
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, DeclineReason, Offer, Wish
from ubatch.streams.graph_protocols import GraphBackend
from ubatch.streams.streams import merge_sm_use
from ubatch.trace.spans import current_trace, note_step, traced_step
from ubatch.wrapping.config import CUDAGraphMode, UBatchConfig
from ubatch.wrapping.eligibility import Eligibility
from ubatch.wrapping.execution import Execution, checked_device, device_of, span
from ubatch.wrapping.guard import Finding, Guard
from ubatch.wrapping.proof import Proof
from ubatch.wrapping.stand_in import refuse_tracing, uncompiled
from ubatch.wrapping.statistics import Tally, UBatchStatistics
from ubatch.wrapping.step import DecidedStep, Intent, Step

T = TypeVar("T")


class WrappedModule:
    """One module, and the state of its wrapper. Arguments, errors: see `UBatchWrapper`.

    Attributes:
        config: the settings; if they name no group, with the group over which the module's experts are spread.
        device, given_graphs, intercepts: the wrapper's arguments, kept for a copy.
        eligibility: decides whether a call may be split; keeps the results of proofs.
        table: the captured graphs; None if graphs are off.
    """

    def __init__(
        self,
        model: nn.Module,
        config: UBatchConfig,
        mode: CUDAGraphMode,
        device: torch.device | str | None,
        graphs: GraphBackend | None,
        intercept: bool,
    ) -> None:
        check_split_dims(model.forward, config.split_dims)
        group = _group_of(model)
        if config.group is None and group is not None:
            config = replace(config, group=group)
        self.model = model
        self.config = config
        self.device = None if device is None else checked_device(device)
        self.given_graphs = graphs
        self.intercepts = intercept
        self.eligibility = Eligibility(model, config, intercept=intercept)
        self.execution = Execution(model, config, self.device, intercept=intercept)
        self.table: GraphTable | None = None
        if mode is not CUDAGraphMode.NONE:
            own = CudaGraphs(device_of(model) if self.device is None else self.device) if graphs is None else graphs
            self.table = GraphTable(own, self.eligibility, model, self._several_ranks)
        elif graphs is not None:
            raise ConfigError("graphs was given, but cudagraph_mode is NONE. Set it to FULL.")
        self.tally = Tally()
        self._claims = Claims()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module; see `UBatchWrapper.forward`."""
        return self._alone(self._beside, self._traced, args, kwargs)

    def run(self, step: DecidedStep) -> list[Any]:
        """The runner's door: run a step that it has voted on and cut. Returns one output per call of the step.

        There is no proof and no guard: tests prove the runner's models. The runner makes one call at a time, and all
        ranks make it together.

        Raises:
            OverlapDeclined: `require_overlap` is set, and the step does not overlap.
            Others: see `UBatchWrapper.forward`.
        """
        if current_trace() is None:
            return self._run(step)
        with traced_step():
            return self._run(step)

    def _run(self, step: DecidedStep) -> list[Any]:
        self.tally.calls += 1
        tokens = tuple([context.num_tokens for context in step.contexts])
        schedule = step.schedule or self.config.for_mode(step.mode).schedule
        note_step(step.mode, sum(tokens), schedule.name)
        if step.schedule is None:
            self._count_declined(step.decision, None)
            return self.execution.run(step)
        outputs = self.execution.run(step)
        self.tally.overlapped(tokens, schedule)
        return outputs

    def _beside(self, other: Claim | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call unsplit while another one runs: in the thread of claim `other`, or, if None, in the lanes that
        this one comes from."""
        self.tally.beside(nested=other is None or other.thread == threading.get_ident())
        if self.config.require_overlap:
            why = "require_overlap is set, but another call runs in this UBatchWrapper."
            raise OverlapDeclined(why, DeclineReason.CONCURRENT_CALL)
        return self.model(*args, **kwargs)

    def _alone(self, otherwise: Callable[..., Any], work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)` as the only call of this wrapper, and as one step of all ranks. If another one runs,
        `otherwise(claim, *args)`; with a group, an error."""
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self._alone, otherwise, work, *args)
        refuse_tracing()
        lane = current_lane()
        if lane is not None and lane.baton.forked:
            what = f"a UBatchWrapper was called in the child of lane {lane.id}, which was forked."
            raise ForkedLaneError(f"{what} Fork outside of calls.")
        claims, group = self._claims, self.config.group
        if lane is not None:
            if otherwise is not _refuse and group is None and claims.held():
                return otherwise(None, *args)
            what = f"a UBatchWrapper was called inside lane {lane.id}."
            raise NestedUBatchError(f"{what} Wrap only the outermost module.")
        if group is None:
            return claims.alone(otherwise, work, *args)
        return claims.alone(_refuse, apart, _in_step, group, work, *args)

    def capture(self, work: Callable[[Capturer], T]) -> T:
        """Run `work` like a call, with a `Capturer` for the current forward context, and return its result.

        Raises:
            CaptureFailed, ConfigError: see `UBatchWrapper.capture`.
        """
        table, context = self.table, get_forward_context()
        if table is None:
            raise ConfigError("nothing is captured with cudagraph_mode NONE. Make the UBatchWrapper with FULL.")
        if not table.graphs:
            gc.collect()  # memory held by reference cycles would count as the graph's
        try:
            decide = functools.partial(self._decide, context=context)
            capturer = Capturer(
                self.model, self.config, self.eligibility, self.execution, table, context, decide, self._prove
            )
            result: T = self._alone(_refuse, apart, work, capturer)
            return result
        except CaptureFailed as failed:  # the cause tells where; the frames in between hold the static inputs
            traceback.clear_frames(failed.__traceback__)
            raise
        finally:
            if not table.graphs:
                table.buffers.clear()

    @property
    def _several_ranks(self) -> bool:
        return self.config.group is not None and self.config.group.size > 1

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with nullcontext() if current_trace() is None else traced_step():
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.tally.calls += 1
        context, eligibility, table = get_forward_context(), self.eligibility, self.table
        if table is not None and why_not_in_lanes() is not None:
            table = None  # a replay would ignore the caller's modes
        if table is not None and context is not None:
            hit = table.planned(args, kwargs, context)
            if hit is not None:
                schedule = context.schedule or self.config.for_mode(context.mode).schedule
                note_step(context.mode, context.num_tokens, schedule.name)
                return self._replay(table, hit, context.decision, None, schedule)
        intent = eligibility.intent(args, kwargs, context)
        note_step(intent.mode, intent.num_tokens, intent.schedule.name)
        lookup = None if table is None else table.look_up(args, kwargs, intent, context)
        if lookup is not None:
            intent = replace(intent, offer=replace(intent.offer, graph_mode=lookup.graph_mode))
        decision = self._decide(intent, context)
        intent = eligibility.settle(intent, decision)
        if table is not None and lookup is not None:
            hit = lookup.settle(decision)
            if hit is not None:
                return self._replay(table, hit, decision, intent.why, intent.schedule)
        step = Step(args, kwargs, intent, decision, context)
        if decision.engaged and intent.calls:
            return self._prove(step) if decision.prove else self._in_lanes(step)
        if decision.engaged and intent.single:
            self.tally.overlapped((intent.num_tokens,), intent.schedule)
        else:
            self._count_declined(decision, intent.why)
        return self.execution.call(step)

    def _in_lanes(self, step: Step) -> Any:
        """Run a call in lanes; then unsplit, if it differs from its proof and can run again."""
        guard = self.eligibility.guard(step.intent, self.tally.neighbours)
        error: Exception
        try:
            output = self.execution.call(step, guard=guard)
        except CannotSplit as cannot:  # known only after the outputs exist
            error, reason, why = cannot, cannot.reason, str(cannot)
        except UBatchError:
            raise
        except Exception as raised:  # the module's own error; unsplit it may raise none, as in its proof
            if self._several_ranks:
                raise
            error, reason = raised, DeclineReason.LANE_FAILED
            why = f"{describe(raised)} (raised in a lane)"
        else:
            self.tally.overlapped(step.intent.offer.tokens, step.intent.schedule)
            return output
        return self._unsplit_after(step, guard, error, reason, why)

    def _unsplit_after(self, step: Step, guard: Guard, error: Exception, reason: DeclineReason, why: str) -> Any:
        """Run a call unsplit that ended with `error` in lanes, if what they changed can be put back.

        Raises:
            SideEffectError: it cannot.
            Exception: `error`, if it is the module's own and lanes have changed something for good; or if the caller
                asked for these lanes, or for no proof.
        """
        lost, proofs, signature = guard.put_back(), self.eligibility.proofs, step.intent.signature
        asked = step.context is not None and step.context.ubatch_slices is not None
        if lost:
            proofs.failed(signature, reason, why)
            what = f"the lanes have changed {', '.join(map(repr, lost))}, which cannot be put back"
            if isinstance(error, CannotSplit):
                raise SideEffectError(f"{why} But {what}: what the call did is invalid.") from error
            note(error, f"{what}: what the call wrote is incomplete")
        if lost or asked or (signature is None and not isinstance(error, Finding)):
            raise error
        # All ranks repeat the step, or none does: one that has merged its outputs is already at its next step.
        offer = step.intent.offer
        decision = self.execution.vote(Offer(Wish.NO, (sum(offer.tokens),), offer.lanes, reason, again=True))
        output = self.execution.call(replace(step, decision=decision))  # its error is that of the bare module
        guard.give_back()
        if signature is not None and isinstance(error, OtherValue):
            proofs.prove_again(signature)
        else:
            proofs.failed(signature, reason, why)
        self._count_declined(decision, why)
        return output

    def _prove(self, step: Step) -> Any:
        """Run a call unsplit, and prove whether calls of its signature may overlap."""
        tally = self.tally
        proof = Proof(self.execution, self.eligibility.proofs, step, tally.neighbours)
        result = proof.run()
        tally.proof_seconds += proof.seconds
        if proof.no is None:
            tally.passed()
        else:
            reason, why = proof.no
            self._count_declined(replace(step.decision.whole(), reason=reason, declined_by=proof.declined_by), why)
        return result

    def _replay(
        self, table: GraphTable, hit: Hit, decision: Decision | None, why: str | None, schedule: Schedule
    ) -> Any:
        key = hit.entry.graph.key
        if key.overlapped:
            self.tally.overlapped(key.tokens, schedule, replayed=True)
        else:
            self._count_declined(decision, why)
        with span("replay"):
            return table.replay(hit)

    def _decide(self, intent: Intent, context: ForwardContext | None) -> Decision:
        decided = None if context is None else context.decision
        return self.execution.vote(intent.offer) if decided is None else decided

    def _count_declined(self, decision: Decision | None, why: str | None) -> None:
        """Count a call that runs unsplit."""
        reason = self.tally.unsplit(decision, why)
        if self.config.require_overlap:
            raise OverlapDeclined(f"require_overlap is set, but the call declined: {self.tally.last_reason}", reason)

    @contextmanager
    def watching(self, how: str) -> Iterator[None]:
        """Notice what the module's method `how` changes in the `with` block."""
        state = self.eligibility.known
        hooks = None if state is None else state.hooks
        try:
            yield
        finally:
            now = self.eligibility.known
            if now is not None and ((now is state and now.hooks != hooks) or (now.moved() and now.changed_items())):
                self.module_changed(how)

    def module_changed(self, how: str) -> None:
        """Handle a change of the module. `how`: the attribute that was set, or the method that may have changed it."""
        if how not in _SAME_MODULE:
            self.eligibility.forget()
        if self.table is not None:  # other methods invalidate a graph only if they move memory
            self.table.module_changed(how, certainly=how.startswith(("attribute", "register_")))

    def arguments(self, graphs: GraphBackend | None) -> tuple[Any, ...]:
        """Constructor arguments (after the module) for a wrapper like this one, with `graphs` as its graph back end."""
        mode = CUDAGraphMode.NONE if self.table is None else CUDAGraphMode.FULL
        return self.config, mode, self.device, graphs, self.intercepts

    def statistics(self) -> UBatchStatistics:
        """How often calls overlapped, and why others did not."""
        pools = [pool.counts for pool in self.execution.pools.values()]
        sm_use: dict[str, bool] = {}
        merge_sm_use(sm_use, *(pool.sm_users for pool in pools))
        table, tally = self.table, self.tally
        return UBatchStatistics(
            **tally.counts(),
            handoffs=sum(pool.handoffs for pool in pools),
            lane_threads_started=sum(pool.threads_started for pool in pools),
            sm_budget=sm_use,
            graph_replays=0 if table is None else table.replays,
            graph_misses=0 if table is None else table.misses.total(),
            graph_misses_by_reason={} if table is None else dict(table.misses),
            last_graph_miss=None if table is None else table.last_miss,
        )


_SAME_MODULE = frozenset({"train", "eval", "zero_grad"})
"""Methods that do not invalidate proofs: the module computes the same after them, or has another signature."""


def _group_of(model: nn.Module) -> CommGroup | None:
    """The ranks that the module's experts are spread over, as noted on the module or one of its parts."""
    noted = (getattr(module, "_ubatch_group", None) for module in model.modules())
    return next((group for group in noted if isinstance(group, CommGroup)), None)


def _in_step(group: CommGroup, work: Callable[..., T], *args: Any) -> T:
    with group.step():
        return work(*args)


def _refuse(other: Claim, *_: object) -> NoReturn:
    """Refuse a call while `other` is in a call."""
    if other.thread == threading.get_ident():
        raise NestedUBatchError("a UBatchWrapper was called from inside its own call. Wrap a module once.")
    what = "another thread is in a call of this UBatchWrapper, whose steps all ranks take together."
    raise ConcurrentCallError(f"{what} Use one wrapper per thread.")
