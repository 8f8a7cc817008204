"""`UBatchWrapper`: a module that overlaps, called as before.

A call, in pseudo-code:
    refuse to run inside a lane, or while another call runs
    may this call be split, is it big enough?  cut it            -> an offer: yes, no (reason), idle; proved or not
    several ranks: vote                                          -> the same decision on all of them
    it was captured, on all of them: replay its graph
    no:   count the reason, run the module as it is
    yes, unproved: run the module as it is, then in lanes on copies, and compare (`proof`)
    yes:  run the module once per lane, put the outputs together
          (one lane that overlaps within the batch: run it as it is, as that lane)
    on any error: tell the peers, raise the original

For everything but its call it stands in for the module (`ubatch.wrapping.stand_in`). Whether to split is decided in
`ubatch.wrapping.eligibility`, how a call runs is in `ubatch.wrapping.execution`, which graph it has in
`ubatch.graphs.table`.
"""

from __future__ import annotations

import copy
import gc
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ubatch.calls.arguments import check_split_dims
from ubatch.calls.call_plan import CannotSplit
from ubatch.errors import (
    ConcurrentCallError,
    ConfigError,
    ForkedLaneError,
    NestedUBatchError,
    OverlapDeclined,
    UBatchError,
)
from ubatch.graphs.capture import Capturer
from ubatch.graphs.cuda import CudaGraphs
from ubatch.graphs.table import GraphTable, Hit
from ubatch.lanes.context import current_lane
from ubatch.lanes.torch_modes import why_not_in_lanes
from ubatch.process.interrupts import Claim, Claims, apart
from ubatch.ranks.group import CommGroup
from ubatch.schedules.forward_context import ForwardContext, get_forward_context
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, DeclineReason, Offer, Wish, decide
from ubatch.streams.graph_protocols import CapturedGraph, CaptureFailed, GraphBackend, GraphKey
from ubatch.streams.sm_budget import merge_sm_use
from ubatch.trace.spans import note_step, traced_step
from ubatch.wrapping.config import CUDAGraphMode, UBatchConfig
from ubatch.wrapping.eligibility import CutCall, Eligibility, Intent
from ubatch.wrapping.execution import Execution, Step, checked_device, device_of, span
from ubatch.wrapping.proof import Proof
from ubatch.wrapping.stand_in import StandIn, refuse_tracing, uncompiled
from ubatch.wrapping.statistics import Tally, UBatchStatistics

__all__ = ["UBatchWrapper"]

T = TypeVar("T")


class UBatchWrapper(StandIn):
    """Runs a module in overlapping microbatches.

    Args:
        model: any module. It is not changed.
        config: thresholds, lanes, schedule, group; see `UBatchConfig`.
        cudagraph_mode: `FULL` lets `capture` and `capture_sizes` record calls as CUDA graphs, and calls replay them.
        device: where the model runs; its first parameter's device by default.
        graphs: what captures; `CudaGraphs` of the device by default.
        intercept_collectives: what the module launches inside torch (`parallelize_module`, DTensor, functional
            collectives, `torch.distributed.all_reduce`) are transfers, and torch's own waits points; see
            `ubatch.ranks.intercept`. For inference: a call that records gradients declines.

    A call overlaps when the forward context carries `ubatch_slices`; otherwise the thresholds decide, from the
    number of tokens (token ids `[B, S]` count B x S, decode if S = 1; otherwise the size of the split dimension).

    Equal or whole: a call returns what the bare module would have returned (values within the rounding of another batch
    size, structure, types, writes to arguments and caches, the module's state, at most its random numbers), or it *is*
    the bare call, once, with a counted reason. The exceptions: coupling between rows that the proved call did not show
    (token dropping by capacity, a rope that follows the longest row); and hooks and effects outside torch happen twice
    in a proving call. That is the first call of a signature that would overlap: it runs whole on the real arguments and
    once more in lanes on copies, and the two are compared (`ubatch.wrapping.proof`, `UBatchConfig.verify`).

    Attributes, parameters, `state_dict`, `to`, `eval` are the module's; attributes set here are set on the module.

    A graph has the module's addresses and flags in it. What changes those through the wrapper drops the graphs (`to`,
    setting an attribute, registering a hook) or keeps them unused (`train`); new values in the same memory
    (`load_state_dict`) are seen. Who changes the module behind the wrapper's back calls `drop_graphs`.

    Raises:
        ConfigError: a graph mode or device that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        config: UBatchConfig | None = None,
        cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        device: torch.device | str | None = None,
        graphs: GraphBackend | None = None,
        intercept_collectives: bool = False,
    ) -> None:
        if isinstance(model, UBatchWrapper):
            raise NestedUBatchError("the module is a UBatchWrapper already. Wrap a module once.")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"UBatchWrapper wraps an nn.Module, not a {type(model).__name__}.")
        for parent in model.modules():
            for name, child in parent._modules.items():
                if isinstance(child, UBatchWrapper):
                    raise NestedUBatchError(
                        f"{type(parent).__name__}.{name} is a UBatchWrapper already. Wrap only the outermost module."
                    )
        mode = CUDAGraphMode.of(cudagraph_mode)
        config = config if config is not None else UBatchConfig()
        check_split_dims(model.forward, config.split_dims)
        group = _group_of(model)
        if config.group is None and group is not None:
            config = replace(config, group=group)
        checked = None if device is None else checked_device(device)
        eligibility = Eligibility(model, config, intercept=intercept_collectives)
        execution = Execution(model, config, checked, intercept=intercept_collectives)
        super().__init__(model)
        self._keep("_ubatch_config", config)
        self._keep("_ubatch_eligibility", eligibility)
        self._keep("_ubatch_execution", execution)
        self._keep("_ubatch_pools", execution.pools)
        self._keep("_ubatch_device", checked)
        self._keep("_ubatch_given_graphs", graphs)
        self._keep("_ubatch_intercepts", intercept_collectives)
        self._keep("_ubatch_table", _table(mode, graphs, eligibility, model, checked))
        self._keep("_ubatch_claims", Claims())
        self._keep("_ubatch_tally", Tally())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on these arguments, overlapped where it pays. Hooks of the module run once per lane.

        Raises:
            NestedUBatchError: called from inside a lane, or from inside its own unsplit call.
            ConcurrentCallError: another thread is in a call.
            SplitError: the forward context asks for a split that these arguments do not allow; or the outputs cannot be
                merged, unlike those of the proof (or without one), and the call wrote to its arguments.
            OverlapDeclined: `require_overlap` is set and the call ran into a reason not to.
            UBatchTimeout, PeerFailed, TransferTimeout, GroupBroken: see there.
        """
        return self._alone(self._traced, args, kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> CapturedGraph:
        """Capture this call as it would run now: in lanes or unsplit, under the current forward context.

        It runs twice before that. The tensors among its arguments become static inputs, everything else is frozen.
        Ranks that share collectives must capture the same calls in the same order. A call is replayed if its tokens per
        lane, mode, other arguments and attention plans (the same objects) are those of the captured one; capturing a
        `GraphKey` anew replaces its graph.

        Raises:
            CaptureFailed: it ran, but cannot be captured. The wrapper is usable at once.
            ConfigError: `cudagraph_mode` is `NONE`; or the module is in training mode, gradients are recorded, an
                argument is elsewhere, is a cache, or is written to.
            Others: see `forward`.
        """
        context = get_forward_context()
        return self._capture(context, lambda capturer: capturer.one((args, kwargs), context))

    def capture_sizes(
        self, *args: Any, progress: Callable[[CapturedGraph], None] | None = None, **kwargs: Any
    ) -> list[CapturedGraph]:
        """Capture a call at every size of `UBatchConfig.cudagraph_capture_sizes`, largest first, overlapped (where the
        thresholds say so) and unsplit. For modules whose rows do not depend on each other: a call of fewer rows is then
        padded with zeros to the next size.

        Args:
            args, kwargs: an example call with at least as many tokens as the largest size.
            progress: called with every graph.

        Raises:
            CaptureFailed, ConfigError: as `capture`; or the call cannot be cut to these sizes, its output not to fewer
                rows, or ranks disagree.
        """
        context = get_forward_context()
        return self._capture(context, lambda capturer: capturer.sizes((args, kwargs), context, progress))

    @property
    def graphs(self) -> Mapping[GraphKey, CapturedGraph]:
        """What was captured."""
        table: GraphTable | None = self._ubatch_table
        return {} if table is None else table.graphs

    def drop_graphs(self) -> None:
        """Give all captured graphs back, such as after the module was changed. Calls run eagerly until new captures."""
        if self._ubatch_table is not None:
            self._ubatch_table.drop()

    # -- one call -----------------------------------------------------------------------------------------------

    def _alone(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)`: one call at a time, and of all ranks together."""
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self._alone, work, *args)
        refuse_tracing()
        lane = current_lane()
        if lane is not None and lane.baton.forked:
            raise ForkedLaneError(
                f"a UBatchWrapper was called in the child of lane {lane.id}, which was forked. Fork outside of calls."
            )
        if lane is not None:
            raise NestedUBatchError(
                f"a UBatchWrapper was called inside lane {lane.id}. Wrap only the outermost module."
            )
        claims: Claims = self._ubatch_claims
        group: CommGroup | None = self._ubatch_config.group
        if group is None:
            return claims.alone(_refuse, work, *args)
        return claims.alone(_refuse, apart, _in_step, group, work, *args)

    def _capture(self, context: ForwardContext | None, work: Callable[[Capturer], T]) -> T:
        table: GraphTable | None = self._ubatch_table
        if table is None:
            raise ConfigError("nothing is captured with cudagraph_mode NONE. Make the UBatchWrapper with FULL.")
        if not table.graphs:
            gc.collect()  # what cycles hold would count as a graph's memory
        config, eligibility, execution = self._ubatch_config, self._ubatch_eligibility, self._ubatch_execution
        try:
            capturer = Capturer(
                self._ubatch_model,
                config,
                eligibility,
                execution,
                table,
                decide=lambda intent: self._decide(intent, context),
                prove=self._prove,
            )
            result: T = self._alone(apart, work, capturer)
            return result
        except CaptureFailed as failed:  # its cause says where; the frames in between hold the static inputs
            traceback.clear_frames(failed.__traceback__)
            raise
        finally:
            if not table.graphs:
                table.buffers.clear()

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with traced_step():
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tally: Tally = self._ubatch_tally
        tally.calls += 1
        context = get_forward_context()
        eligibility: Eligibility = self._ubatch_eligibility
        execution: Execution = self._ubatch_execution
        table: GraphTable | None = self._ubatch_table
        if table is not None and why_not_in_lanes() is not None:
            table = None  # a replay would do without the caller's modes, too
        group: CommGroup | None = self._ubatch_config.group
        several_ranks = group is not None and group.size > 1
        if table is not None and context is not None:
            hit = table.planned(args, kwargs, context, several_ranks=several_ranks)
            if hit is not None:
                schedule = context.schedule or self._ubatch_config.for_mode(context.mode).schedule
                note_step(context.mode, context.num_tokens, schedule.name)
                return self._replay(hit, context.decision, None, schedule)
        intent = eligibility.intent(args, kwargs, context)
        note_step(intent.mode, intent.num_tokens, intent.schedule.name)
        lookup = None if table is None else table.look_up(args, kwargs, intent, context)
        if lookup is not None:
            intent = replace(intent, offer=replace(intent.offer, graph_mode=lookup.graph_mode))
        decision = self._decide(intent, context)
        intent = eligibility.settle(intent, decision)
        if lookup is not None:
            hit = lookup.settle(decision, several_ranks=several_ranks)
            if hit is not None:
                return self._replay(hit, decision, intent.why, intent.schedule)
        step = Step(args, kwargs, intent, decision, context)
        if decision.engaged and intent.single:
            tally.overlapped((intent.num_tokens,), intent.schedule)
            return execution.single(step)
        if decision.engaged and intent.cut is not None:
            return self._prove(step) if decision.prove else self._in_lanes(step, intent.cut)
        self._count_declined(decision, intent.why)
        return execution.unsplit(step)

    def _in_lanes(self, step: Step, cut: CutCall) -> Any:
        """Run a call in lanes; then whole, if it was unlike its proof and may run once more."""
        tally: Tally = self._ubatch_tally
        eligibility: Eligibility = self._ubatch_eligibility
        execution: Execution = self._ubatch_execution
        group: CommGroup | None = self._ubatch_config.group
        try:
            output = execution.lanes(step, cut)
            tally.overlapped(cut.tokens, step.intent.schedule)
            return output
        except CannotSplit as cannot:  # only the outputs could tell
            if not eligibility.may_run_again(step.intent):
                raise
            reason, why = cannot.reason, str(cannot)
        except UBatchError:
            raise
        except Exception as error:  # of the module's own; whole it may raise nothing, as in its proof
            if (group is not None and group.size > 1) or not eligibility.may_run_again(step.intent):
                raise
            reason, why = DeclineReason.LANE_FAILED, f"{type(error).__name__}: {error} (raised in a lane)"
        decision = self._decide_again(step.intent, reason)
        output = execution.unsplit(replace(step, decision=decision))  # what it raises here, it would have raised bare
        eligibility.proofs.failed(step.intent.signature, reason, why)
        self._count_declined(decision, why)
        return output

    def _prove(self, step: Step) -> Any:
        """Run a call as it is, and find out whether its like may overlap."""
        tally: Tally = self._ubatch_tally
        proofs = self._ubatch_eligibility.proofs
        outcome = Proof(self._ubatch_model, self._ubatch_config, self._ubatch_execution, proofs, step).run()
        tally.proof_seconds += outcome.seconds
        if outcome.reason is None:
            tally.passed()
        else:
            no = replace(step.decision.whole(), reason=outcome.reason, declined_by=outcome.declined_by)
            self._count_declined(no, outcome.why)
        return outcome.result

    def _replay(self, hit: Hit, decision: Decision | None, why: str | None, schedule: Schedule) -> Any:
        key = hit.entry.graph.key
        if key.overlapped:
            self._ubatch_tally.overlapped(key.tokens, schedule, replayed=True)
        else:
            self._count_declined(decision, why)
        with span("replay"):
            return self._ubatch_table.replay(hit)

    def _decide(self, intent: Intent, context: ForwardContext | None) -> Decision:
        group: CommGroup | None = self._ubatch_config.group
        if context is not None and context.decision is not None:
            return context.decision
        return decide([intent.offer]) if group is None else group.vote(intent.offer)

    def _decide_again(self, intent: Intent, reason: DeclineReason) -> Decision:
        """Repeat the step unsplit, if all ranks do: one that could merge its outputs is at its next step already."""
        group: CommGroup | None = self._ubatch_config.group
        offer = Offer(Wish.NO, (sum(intent.offer.tokens),), intent.offer.lanes, reason, again=True)
        return decide([offer]) if group is None else group.vote(offer)

    def _count_declined(self, decision: Decision | None, why: str | None) -> None:
        """Count a call that runs unsplit.

        Raises:
            OverlapDeclined: it must overlap.
        """
        tally: Tally = self._ubatch_tally
        reason = tally.unsplit(decision, why)
        if self._ubatch_config.require_overlap:
            raise OverlapDeclined(f"require_overlap is set, but the call declined: {tally.last_reason}", reason)

    def _module_changed(self, how: str) -> None:
        if how not in _SAME_MODULE:
            self._ubatch_eligibility.proofs.clear()
        table: GraphTable | None = self._ubatch_table
        if table is not None:  # hooks and attributes are not in a graph; of the rest only what moves memory counts
            table.module_changed(how, certainly=how.startswith(("attribute", "register_")))

    # -- the wrapper's own methods ------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The module's `config` where it has one (Hugging Face models do), else the wrapper's."""
        return getattr(self._ubatch_model, "config", self._ubatch_config)

    @property
    def ubatch_config(self) -> UBatchConfig:
        """The wrapper's settings."""
        config: UBatchConfig = self._ubatch_config
        return config

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        model: nn.Module = self._ubatch_model
        return model

    def statistics(self) -> UBatchStatistics:
        """How often overlap engaged, and why not when it did not."""
        pools = [pool.statistics() for pool in self._ubatch_pools.values()]
        sm_use: dict[str, bool] = {}
        merge_sm_use(sm_use, *(pool.sm_users for pool in pools))
        table: GraphTable | None = self._ubatch_table
        tally: Tally = self._ubatch_tally
        return UBatchStatistics(
            calls=tally.calls,
            engaged=tally.engaged,
            declined=dict(tally.declined),
            handoffs=sum(pool.handoffs for pool in pools),
            lane_threads_started=sum(pool.threads_started for pool in pools),
            sm_budget=sm_use,
            last_reason=tally.last_reason,
            graph_replays=0 if table is None else table.replays,
            graph_misses=0 if table is None else table.misses.total(),
            graph_misses_by_reason={} if table is None else dict(table.misses),
            last_graph_miss=None if table is None else table.last_miss,
            engaged_single=tally.engaged_single,
            proved=tally.proved,
            proof_seconds=tally.proof_seconds,
        )

    def no_timeout(self) -> AbstractContextManager[None]:
        """Suspend the hang check in the `with` block, and let peers wait: first calls may compile or tune long."""
        execution: Execution = self._ubatch_execution
        return execution.no_timeout()

    def close(self) -> None:
        """Stop the lanes' threads. The wrapper may be used again; the next overlapped call makes new ones."""
        self._ubatch_execution.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> UBatchWrapper:
        """A copy of the module in a wrapper with the same settings and group, and nothing captured yet."""
        given: GraphBackend | None = self._ubatch_given_graphs
        return type(self)(
            copy.deepcopy(self._ubatch_model, memo),
            self._ubatch_config,
            self._graph_mode(),
            self._ubatch_device,
            None if given is None else given.another(),
            self._ubatch_intercepts,
        )

    def __reduce__(self) -> Any:
        given: GraphBackend | None = self._ubatch_given_graphs
        mode, device = self._graph_mode(), self._ubatch_device
        return type(self), (self._ubatch_model, self._ubatch_config, mode, device, given, self._ubatch_intercepts)

    def _graph_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.NONE if self._ubatch_table is None else CUDAGraphMode.FULL


_SAME_MODULE = frozenset({"train", "eval", "zero_grad", "requires_grad_"})
"""Methods after which the module computes what it did, or another signature."""


def _group_of(model: nn.Module) -> CommGroup | None:
    """The ranks that the module's experts are spread over, as whoever spread them noted on it or on a part of it."""
    noted = (getattr(module, "_ubatch_group", None) for module in model.modules())
    return next((group for group in noted if isinstance(group, CommGroup)), None)


def _in_step(group: CommGroup, work: Callable[..., T], *args: Any) -> T:
    with group.step():
        return work(*args)


def _refuse(other: Claim) -> UBatchError:
    """What a call raises while `other` is in one."""
    if other.thread == threading.get_ident():
        return NestedUBatchError("a UBatchWrapper was called from inside its own call. Wrap a module once.")
    return ConcurrentCallError("another thread is in a call of this UBatchWrapper. Use one wrapper per thread.")


def _table(
    mode: CUDAGraphMode,
    graphs: GraphBackend | None,
    eligibility: Eligibility,
    model: nn.Module,
    device: torch.device | None,
) -> GraphTable | None:
    if mode is CUDAGraphMode.NONE:
        if graphs is not None:
            raise ConfigError("graphs was given, but cudagraph_mode is NONE. Set it to FULL.")
        return None
    if graphs is None:
        graphs = CudaGraphs(device_of(model) if device is None else device)
    return GraphTable(graphs, eligibility, model)
