"""`UBatchWrapper`: a module that overlaps, called as before.

A call, in pseudo-code:
    refuse to run inside a lane, or while another call runs
    may this call be split, is it big enough?                    -> an offer: yes, no (reason), idle
    several ranks: vote                                          -> the same decision on all of them
    no:   count the reason, run the module as it is
    yes:  cut the arguments, run the module once per lane, concatenate the outputs
    on any error: tell the peers, raise the original

The module itself is not changed. Its other methods (`generate`, ...) run on a *twin*: an object of a subclass that
shares the module's `__dict__` and whose `forward` is this wrapper's, so that what they call goes through here.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ubatch.arguments import CallPlan, CannotSplit, even_bounds, merge_outputs, parameter_names, plan_call
from ubatch.config import CUDAGraphMode, UBatchConfig
from ubatch.context import current_lane
from ubatch.errors import ConcurrentCallError, ConfigError, NestedUBatchError, OverlapDeclined, SplitError
from ubatch.forward_context import ForwardContext, ForwardMode, get_forward_context, set_forward_context
from ubatch.group import CommGroup
from ubatch.schedule import Schedule
from ubatch.split import UBatchSlice
from ubatch.trace import UNSPLIT, SpanKind, current_trace
from ubatch.vote import Decision, DeclineReason, Offer, Wish, decide, fingerprint
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


@dataclass(frozen=True)
class _Intent:
    """What this rank would do with one call.

    Attributes:
        offer: for the vote.
        why: a sentence, where it would run unsplit.
        plan: how to cut the arguments, where it would split.
        bounds: the rows of every lane.
        mode: decode or prefill.
        num_tokens: of the whole call.
    """

    offer: Offer
    why: str | None
    plan: CallPlan | None
    bounds: tuple[slice, ...]
    mode: ForwardMode
    num_tokens: int


class UBatchWrapper(nn.Module):
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
        if CUDAGraphMode(cudagraph_mode) is not CUDAGraphMode.NONE:
            raise ConfigError("cudagraph_mode=FULL: capturing CUDA graphs is not available yet. Use NONE.")
        config = config if config is not None else UBatchConfig()
        if config.group is None and getattr(model, "_ubatch_group", None) is not None:
            config = replace(config, group=model._ubatch_group)
        if device is None:
            device = next((tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())), "cpu")
        keep = functools.partial(object.__setattr__, self)
        keep("_ubatch_model", model)
        keep("_ubatch_config", config)
        keep("_ubatch_schedule", config.resolved_schedule())
        keep("_ubatch_device", torch.device(device))
        keep("_ubatch_pools", {})
        keep("_ubatch_names", parameter_names(model.forward))
        keep("_ubatch_busy", threading.Lock())
        keep("_ubatch_owner", 0)
        keep("_ubatch_calls", 0)
        keep("_ubatch_engaged", 0)
        keep("_ubatch_declined", Counter())
        keep("_ubatch_last_reason", None)
        keep("_ubatch_unmergeable", {})
        keep("_ubatch_twin", _twin_of(self, model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own call; hooks of the module run once per lane."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on these arguments, overlapped where it pays.

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
        object.__setattr__(self, "_ubatch_owner", threading.get_ident())
        group = self._ubatch_config.group
        try:
            return self._step(args, kwargs)
        except BaseException as error:
            if group is not None and not isinstance(error, OverlapDeclined):
                group.post_failure(error)
            raise
        finally:
            object.__setattr__(self, "_ubatch_owner", 0)
            self._ubatch_busy.release()

    # -- one call -----------------------------------------------------------------------------------------------

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        object.__setattr__(self, "_ubatch_calls", self._ubatch_calls + 1)
        trace = current_trace()
        if trace is not None:
            trace.step += 1
        context = get_forward_context()
        intent = self._intent(args, kwargs, context)
        decision = self._decide(intent, context)
        if decision.engaged:
            if intent.plan is None or not intent.bounds:
                raise SplitError("the forward context's decision says to overlap, but it has no ubatch_slices.")
            try:
                return self._run_lanes(intent, intent.plan, decision, context)
            except CannotSplit as cannot:  # only the outputs could tell
                if context is not None and context.ubatch_slices is not None:
                    raise
                self._ubatch_unmergeable[_call_key(args, kwargs)] = cannot
                decision = replace(decision, engaged=False, reason=cannot.reason, tokens=_whole(decision))
                intent = replace(intent, why=str(cannot))
        return self._run_unsplit(args, kwargs, intent, decision, context)

    def _intent(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext | None) -> _Intent:
        slices = context.ubatch_slices if context is not None else None
        config, schedule = self._ubatch_config, self._ubatch_schedule
        try:
            plan = plan_call(self._ubatch_names, args, kwargs, config.split_dims)
        except CannotSplit as cannot:
            if slices is not None:
                raise
            return self._no(cannot.reason, str(cannot), 0 if context is None else context.num_tokens)
        mode = ForwardMode.DECODE if plan.decode else ForwardMode.PREFILL
        if context is not None and (slices is not None or context.num_tokens):
            mode = context.mode
        if slices is not None:
            bounds = _explicit_bounds(slices, plan)
            schedule = schedule.with_lanes(len(slices))
            return self._yes(plan, bounds, mode, schedule, [part.num_tokens for part in slices])
        no = self._objection(plan, mode, args, kwargs, context)
        if no is not None:
            return self._no(no[0], no[1], plan.num_tokens, mode)
        bounds = even_bounds(plan.rows, schedule.lanes)
        return self._yes(
            plan, bounds, mode, schedule, [(rows.stop - rows.start) * plan.tokens_per_row for rows in bounds]
        )

    def _objection(
        self,
        plan: CallPlan,
        mode: ForwardMode,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ForwardContext | None,
    ) -> tuple[DeclineReason, str] | None:
        """Why this rank would rather not split a call that could be split; an idle rank has no objection."""
        config, lanes = self._ubatch_config, self._ubatch_schedule.lanes
        if not config.enable_dbo:
            return DeclineReason.DISABLED, "enable_dbo is off."
        if lanes == 1:
            return DeclineReason.SERIAL_SCHEDULE, f"schedule {self._ubatch_schedule.name!r} has one lane."
        if context is not None and context.attn_metadata is not None:
            return (
                DeclineReason.NOT_REQUESTED,
                "the forward context has attention metadata but no ubatch_slices: its caller wants one batch.",
            )
        if plan.rows == 0 and config.group is not None:
            return None
        decode = mode is ForwardMode.DECODE
        threshold = config.dbo_decode_token_threshold if decode else config.dbo_prefill_token_threshold
        if plan.num_tokens < threshold:
            reason = DeclineReason.BELOW_DECODE_THRESHOLD if decode else DeclineReason.BELOW_PREFILL_THRESHOLD
            return reason, f"{plan.num_tokens} tokens are below the {mode} threshold of {threshold}."
        if plan.rows < lanes:
            return DeclineReason.LAST_UBATCH_EMPTY, f"{plan.rows} rows leave a lane of {lanes} empty."
        known = self._ubatch_unmergeable.get(_call_key(args, kwargs))
        if known is not None:
            return known.reason, str(known)
        return _batch_dependence(self._ubatch_model)

    def _no(self, reason: DeclineReason, why: str, tokens: int, mode: ForwardMode = ForwardMode.PREFILL) -> _Intent:
        schedule = self._ubatch_schedule
        offer = Offer(
            Wish.NO, (tokens,), schedule.lanes, reason, fingerprint(schedule.describe()), fingerprint(mode), graph_mode=0
        )
        return _Intent(offer, why, None, (), mode, tokens)

    def _yes(
        self, plan: CallPlan, bounds: Sequence[slice], mode: ForwardMode, schedule: Schedule, tokens: Sequence[int]
    ) -> _Intent:
        offer = Offer(
            Wish.YES if any(tokens) else Wish.IDLE,
            tuple(tokens),
            schedule.lanes,
            None,
            fingerprint(schedule.describe()),
            fingerprint(mode),
            graph_mode=0,
        )
        return _Intent(offer, None, plan, tuple(bounds), mode, sum(tokens))

    def _decide(self, intent: _Intent, context: ForwardContext | None) -> Decision:
        group = self._ubatch_config.group
        if context is not None and context.decision is not None:
            return context.decision
        if group is not None:
            return group.vote(intent.offer)
        return decide([intent.offer])

    def _run_unsplit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        intent: _Intent,
        decision: Decision,
        context: ForwardContext | None,
    ) -> Any:
        reason = decision.reason if decision.reason is not None else DeclineReason.NOT_REQUESTED
        why = (
            intent.why or f"{reason} (rank {decision.declined_by})" if decision.declined_by is not None else intent.why
        )
        self._ubatch_declined[reason] += 1
        object.__setattr__(self, "_ubatch_last_reason", f"{reason}: {why}" if why else str(reason))
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

    def _run_lanes(self, intent: _Intent, plan: CallPlan, decision: Decision, context: ForwardContext | None) -> Any:
        lanes = len(intent.bounds)
        calls, caches = plan.cut(intent.bounds)
        contexts = self._lane_contexts(intent, decision, context)
        model = self._ubatch_model
        bodies = [functools.partial(_call, model, *call) for call in calls]
        group = self._ubatch_config.group
        voted = frozenset(group.ranks) if group is not None else frozenset()
        outputs = self._pool(lanes).run(bodies, self._ubatch_schedule.with_lanes(lanes), contexts, voted)
        rows = [part.stop - part.start for part in intent.bounds]
        merged = merge_outputs(outputs, rows, caches, self._ubatch_config.output_dims)
        object.__setattr__(self, "_ubatch_engaged", self._ubatch_engaged + 1)
        return merged

    def _lane_contexts(
        self, intent: _Intent, decision: Decision, context: ForwardContext | None
    ) -> list[ForwardContext]:
        if context is not None and context.lane_contexts is not None:
            if len(context.lane_contexts) != len(intent.bounds):
                raise ConfigError(
                    f"{len(intent.bounds)} ubatch_slices need as many lane_contexts, not {len(context.lane_contexts)}."
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
        if lanes not in self._ubatch_pools:
            self._ubatch_pools[lanes] = LanePool(lanes, self._ubatch_device, self._ubatch_config.timeout_s)
        pool: LanePool = self._ubatch_pools[lanes]
        return pool

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
        pool = self._pool(self._ubatch_config.num_ubatches)
        with pool.no_timeout():
            yield

    def close(self) -> None:
        """Stop the lanes' threads. The wrapper may be used again; the next overlapped call makes new ones."""
        for pool in self._ubatch_pools.values():
            pool.close()

    # -- being the module for everything else ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_ubatch_"):
            raise AttributeError(f"UBatchWrapper.__init__ did not run: no {name}")
        return getattr(self._ubatch_twin, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ubatch_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ubatch_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._ubatch_model)})

    def __repr__(self) -> str:
        return f"UBatchWrapper({self._ubatch_model!r})"

    def __reduce__(self) -> Any:
        return type(self), (self._ubatch_model, self._ubatch_config, CUDAGraphMode.NONE, self._ubatch_device)


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _twin_of(wrapper: UBatchWrapper, model: nn.Module) -> nn.Module:
    """An object that *is* the module (same `__dict__`), but whose call and forward go through the wrapper."""
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper.forward(*args, **kwargs)

    twin_kind = type(kind.__name__, (kind,), {"__call__": forward, "forward": forward, "__module__": kind.__module__})
    twin: nn.Module = object.__new__(twin_kind)
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def _delegate(name: str) -> Callable[..., Any]:
    """A method that the module runs; where it returns itself, the wrapper returns itself."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: UBatchWrapper, *args: Any, **kwargs: Any) -> Any:
        model = self._ubatch_model
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return method


def _delegate_module_methods() -> None:
    """`nn.Module`'s own public methods (and the two that its recursion uses) act on the wrapped module."""
    own = set(UBatchWrapper.__dict__) | {"forward"}
    for name, value in vars(nn.Module).items():
        if callable(value) and name not in own and (not name.startswith("_") or name in ("_apply", "_named_members")):
            setattr(UBatchWrapper, name, _delegate(name))


_delegate_module_methods()


def _explicit_bounds(slices: Sequence[UBatchSlice], plan: CallPlan) -> list[slice]:
    """Row ranges for the slices that a forward context asks for."""
    if len(slices) < 2:
        raise SplitError(f"ubatch_slices needs at least 2 slices, not {len(slices)}. Leave it None to run unsplit.")
    by_token = plan.tokens_per_row == 1 and not plan.decode
    bounds = [part.token_slice if by_token else part.request_slice for part in slices]
    if bounds[-1].stop != plan.rows:
        raise SplitError(
            f"ubatch_slices cover {bounds[-1].stop} {'tokens' if by_token else 'requests'}, "
            f"but the arguments have {plan.rows} rows."
        )
    return bounds


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """Calls with the same arguments present have outputs of the same structure."""
    return (len(args), *(index for index, arg in enumerate(args) if arg is None)), *sorted(
        name for name, value in kwargs.items() if value is not None
    )


def _whole(decision: Decision) -> tuple[tuple[int, ...], ...]:
    return tuple((sum(row),) for row in decision.tokens)


def _batch_dependence(model: nn.Module) -> tuple[DeclineReason, str] | None:
    """In training, what makes a row's result depend on the other rows or on the order of random numbers."""
    if not model.training:
        return None
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return DeclineReason.BATCH_NORM_IN_TRAINING, f"{name or 'the module'} normalises over the whole batch."
        rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        rates += [value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)]
        if any(rate > 0 for rate in rates):
            return DeclineReason.DROPOUT_IN_TRAINING, f"{name or 'the module'} drops out at random; call eval()."
    return None


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
