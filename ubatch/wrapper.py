"""`UBatchWrapper`: a module that overlaps, called as before.

A call, in pseudo-code:
    refuse to run inside a lane, or while another call runs
    may this call be split, is it big enough?  cut it            -> an offer: yes, no (reason), idle
    several ranks: vote                                          -> the same decision on all of them
    no:   count the reason, run the module as it is
    yes:  run the module once per lane, concatenate the outputs
    on any error: tell the peers, raise the original

For everything but its call it stands in for the module (`facade`); whether to split is decided in `planner`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ubatch.arguments import CannotSplit, check_split_dims
from ubatch.config import CUDAGraphMode, UBatchConfig
from ubatch.context import current_lane
from ubatch.errors import ConcurrentCallError, ConfigError, NestedUBatchError, OverlapDeclined, SplitError, nearest
from ubatch.facade import ModuleFacade
from ubatch.forward_context import ForwardContext, get_forward_context, set_forward_context
from ubatch.group import CommGroup
from ubatch.outputs import merge_outputs
from ubatch.planner import CutCall, Intent, Planner
from ubatch.streams import make_streams
from ubatch.trace import UNSPLIT, SpanKind, current_trace
from ubatch.vote import Decision, DeclineReason, Offer, Wish, decide
from ubatch.workers import LanePool

__all__ = ["UBatchStatistics", "UBatchWrapper"]


@dataclass(frozen=True)
class UBatchStatistics:
    """What a wrapper did since it was made.

    Attributes:
        calls: all calls.
        engaged: calls that ran in lanes.
        declined: calls that ran unsplit, by reason.
        handoffs: switches from one lane to another.
        lane_threads_started: worker threads made; more than the lanes means some hung and were replaced.
        last_reason: a sentence about the last call that declined, or None.
    """

    calls: int
    engaged: int
    declined: Mapping[DeclineReason, int]
    handoffs: int
    lane_threads_started: int
    last_reason: str | None


class UBatchWrapper(ModuleFacade):
    """Runs a module in overlapping microbatches.

    Args:
        model: any module. It is not changed.
        config: thresholds, lanes, schedule, group; see `UBatchConfig`.
        cudagraph_mode: only `NONE` so far.
        device: where the model runs; its first parameter's device by default.

    A call overlaps when the forward context carries `ubatch_slices`; otherwise the thresholds decide, from the
    number of tokens (token ids `[B, S]` count B x S, decode if S = 1; otherwise the size of the split dimension).
    Attributes, parameters, `state_dict`, `to`, `eval` are the module's; attributes set here are set on the module.

    Raises:
        ConfigError: a graph mode or device that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        config: UBatchConfig | None = None,
        cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        device: torch.device | str | None = None,
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
        _check_graph_mode(cudagraph_mode)
        config = config if config is not None else UBatchConfig()
        check_split_dims(model.forward, config.split_dims)
        group: Any = getattr(model, "_ubatch_group", None)
        if config.group is None and group is not None:
            config = replace(config, group=group)
        super().__init__(model)
        self._keep("_ubatch_config", config)
        self._keep("_ubatch_planner", Planner(model, config))
        self._keep("_ubatch_device", None if device is None else _checked_device(device))
        self._keep("_ubatch_pools", {})
        self._keep("_ubatch_patience", 0)
        self._keep("_ubatch_busy", threading.Lock())
        self._keep("_ubatch_owner", 0)
        self._keep("_ubatch_calls", 0)
        self._keep("_ubatch_engaged", 0)
        self._keep("_ubatch_declined", Counter())
        self._keep("_ubatch_last_reason", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on these arguments, overlapped where it pays. Hooks of the module run once per lane.

        Raises:
            NestedUBatchError: called from inside a lane, or from inside its own unsplit call.
            ConcurrentCallError: another thread is in a call.
            SplitError: the forward context asks for a split that these arguments do not allow.
            OverlapDeclined: `require_overlap` is set and the call ran into a reason not to.
            UBatchTimeout, PeerFailed, TransferTimeout, GroupBroken: see there.
        """
        lane = current_lane()
        if lane is not None:
            raise NestedUBatchError(
                f"a UBatchWrapper was called inside lane {lane.id}. Wrap only the outermost module."
            )
        if not self._ubatch_busy.acquire(blocking=False):
            if self._ubatch_owner == threading.get_ident():
                raise NestedUBatchError("a UBatchWrapper was called from inside its own call. Wrap a module once.")
            raise ConcurrentCallError("another thread is in a call of this UBatchWrapper. Use one wrapper per thread.")
        group = self._ubatch_config.group
        try:
            self._keep("_ubatch_owner", threading.get_ident())
            with group.step() if group is not None else nullcontext():
                return self._step(args, kwargs)
        finally:
            self._keep("_ubatch_owner", 0)
            self._ubatch_busy.release()

    # -- one call -----------------------------------------------------------------------------------------------

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._keep("_ubatch_calls", self._ubatch_calls + 1)
        trace = current_trace()
        if trace is not None:
            trace.step += 1
        context = get_forward_context()
        planner: Planner = self._ubatch_planner
        intent = planner.intent(args, kwargs, context)
        decision = self._decide(intent, context)
        if decision.engaged and intent.cut is not None:
            try:
                return self._run_lanes(intent, intent.cut, decision, context)
            except CannotSplit as cannot:  # only the outputs could tell
                if context is not None and context.ubatch_slices is not None:
                    raise
                planner.remember_unmergeable(args, kwargs, cannot)
                decision = self._decide_again(intent, cannot)
                intent = replace(intent, why=str(cannot))
        return self._run_unsplit(args, kwargs, intent, decision, context)

    def _decide(self, intent: Intent, context: ForwardContext | None) -> Decision:
        group: CommGroup | None = self._ubatch_config.group
        if context is not None and context.decision is not None:
            if context.decision.engaged and context.ubatch_slices is None:
                raise SplitError("the forward context's decision says to overlap, but it has no ubatch_slices.")
            return context.decision
        return decide([intent.offer]) if group is None else group.vote(intent.offer)

    def _decide_again(self, intent: Intent, cannot: CannotSplit) -> Decision:
        """Repeat the step unsplit, if all ranks do: one that could merge its outputs is at its next step already."""
        group: CommGroup | None = self._ubatch_config.group
        offer = Offer(Wish.NO, (sum(intent.offer.tokens),), intent.offer.lanes, cannot.reason, again=True)
        return decide([offer]) if group is None else group.vote(offer)

    def _run_unsplit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        intent: Intent,
        decision: Decision,
        context: ForwardContext | None,
    ) -> Any:
        reason = decision.reason if decision.reason is not None else DeclineReason.NOT_REQUESTED
        why = (
            intent.why or f"{reason} (rank {decision.declined_by})" if decision.declined_by is not None else intent.why
        )
        self._ubatch_declined[reason] += 1
        self._keep("_ubatch_last_reason", f"{reason}: {why}" if why else str(reason))
        if self._ubatch_config.require_overlap:
            raise OverlapDeclined(
                f"require_overlap is set, but the call declined: {reason}. {why or ''}".strip(), reason
            )
        around: AbstractContextManager[Any] = nullcontext()
        if self._ubatch_config.group is not None and (context is None or context.tokens_across_ranks is None):
            base = context if context is not None else ForwardContext(num_tokens=intent.num_tokens, mode=intent.mode)
            around = set_forward_context(replace(base, tokens_across_ranks=decision.lane_tokens(0), decision=decision))
        with around, _span("unsplit"):
            return self._ubatch_model(*args, **kwargs)

    def _run_lanes(self, intent: Intent, cut: CutCall, decision: Decision, context: ForwardContext | None) -> Any:
        lanes = len(cut.bounds)
        contexts = self._lane_contexts(intent, decision, context)
        model = self._ubatch_model
        bodies = [functools.partial(_call, model, *call) for call in cut.calls]
        group = self._ubatch_config.group
        voted = frozenset(group.ranks) if group is not None else frozenset()
        pool = self._pool(lanes)
        with pool.no_timeout() if self._ubatch_patience else nullcontext():
            outputs = pool.run(bodies, self._ubatch_planner.schedule.with_lanes(lanes), contexts, voted)
        merged = merge_outputs(outputs, cut.plan, cut.bounds, cut.caches, self._ubatch_config.output_dims)
        self._keep("_ubatch_engaged", self._ubatch_engaged + 1)
        return merged

    def _lane_contexts(
        self, intent: Intent, decision: Decision, context: ForwardContext | None
    ) -> list[ForwardContext]:
        if context is not None and context.lane_contexts is not None:
            if len(context.lane_contexts) != len(intent.offer.tokens):
                raise ConfigError(
                    f"{len(intent.offer.tokens)} ubatch_slices need as many lane_contexts, "
                    f"not {len(context.lane_contexts)}."
                )
            return list(context.lane_contexts)
        if context is not None and context.attn_metadata is not None:
            raise ConfigError(
                "a forward context with ubatch_slices and attn_metadata needs lane_contexts, one per slice."
            )
        return [
            ForwardContext(
                num_tokens=tokens, mode=intent.mode, tokens_across_ranks=decision.lane_tokens(lane), decision=decision
            )
            for lane, tokens in enumerate(intent.offer.tokens)
        ]

    def _pool(self, lanes: int) -> LanePool:
        device = self._ubatch_device
        if device is None:  # the module may have moved since the last call
            tensors = itertools.chain(self._ubatch_model.parameters(), self._ubatch_model.buffers())
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        pools: dict[tuple[int, torch.device], LanePool] = self._ubatch_pools
        if (lanes, device) not in pools:
            pools[lanes, device] = LanePool(lanes, device, self._ubatch_config.timeout_s)
        return pools[lanes, device]

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
        return UBatchStatistics(
            calls=self._ubatch_calls,
            engaged=self._ubatch_engaged,
            declined=dict(self._ubatch_declined),
            handoffs=sum(pool.handoffs for pool in pools),
            lane_threads_started=sum(pool.threads_started for pool in pools),
            last_reason=self._ubatch_last_reason,
        )

    @contextmanager
    def no_timeout(self) -> Iterator[None]:
        """Suspend the hang check in the `with` block: first calls may compile or autotune for minutes."""
        self._keep("_ubatch_patience", self._ubatch_patience + 1)
        try:
            yield
        finally:
            self._keep("_ubatch_patience", self._ubatch_patience - 1)

    def close(self) -> None:
        """Stop the lanes' threads. The wrapper may be used again; the next overlapped call makes new ones."""
        for pool in self._ubatch_pools.values():
            pool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> UBatchWrapper:
        """A copy of the module in a wrapper with the same settings and group."""
        return type(self)(copy.deepcopy(self._ubatch_model, memo), self._ubatch_config, device=self._ubatch_device)

    def __reduce__(self) -> Any:
        return type(self), (self._ubatch_model, self._ubatch_config, CUDAGraphMode.NONE, self._ubatch_device)


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _check_graph_mode(mode: CUDAGraphMode | str) -> None:
    known = [each.value for each in CUDAGraphMode]
    if mode not in known:
        raise ConfigError(f"unknown cudagraph_mode {mode!r}{nearest(str(mode), known)}")
    if CUDAGraphMode(mode) is not CUDAGraphMode.NONE:
        raise ConfigError("cudagraph_mode=FULL: capturing CUDA graphs is not available yet. Use NONE.")


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is no torch device. Use 'cpu' or 'cuda'.") from error
    make_streams(checked)
    return checked


@contextmanager
def _span(name: str) -> Iterator[None]:
    trace = current_trace()
    if trace is None:
        yield
        return
    start = time.monotonic()
    try:
        yield
    finally:
        trace.add(SpanKind.COMPUTE, name, UNSPLIT, start, time.monotonic())
