"""What this rank would do with a call: overlap it or not, and why not. Nothing runs here, and no rank is asked.

In pseudo-code:
    the forward context says where to cut     -> cut there, or refuse by name
    the arguments cannot be cut               -> no: which argument, and what to do about it
    switched off, too small, not safe         -> no, with the reason
    otherwise                                 -> cut evenly

The arguments are cut here already, not once the ranks have voted: what cannot be cut must be known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ubatch.arguments import CacheParts, CallPlan, CannotSplit, even_bounds, parameter_names, plan_call
from ubatch.config import UBatchConfig
from ubatch.errors import SplitError
from ubatch.forward_context import ForwardContext, ForwardMode
from ubatch.schedule import Schedule
from ubatch.split import UBatchSlice
from ubatch.vote import MAX_LANES, DeclineReason, Offer, Wish, fingerprint

__all__ = ["CutCall", "Intent", "Planner"]


@dataclass(frozen=True)
class CutCall:
    """A call that was cut.

    Attributes:
        plan: how.
        bounds: the rows of every lane.
        calls: the arguments of every lane.
        caches: what must be merged afterwards.
    """

    plan: CallPlan
    bounds: tuple[slice, ...]
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    caches: CacheParts


@dataclass(frozen=True)
class Intent:
    """What this rank would do with one call.

    Attributes:
        offer: for the vote.
        why: a sentence, where it would run unsplit.
        cut: the arguments, cut, where it would overlap.
        mode: decode or prefill.
        num_tokens: of the whole call.
    """

    offer: Offer
    why: str | None
    cut: CutCall | None
    mode: ForwardMode
    num_tokens: int


class Planner:
    """Decides for one module and its settings.

    Args:
        model: any module.
        config: its thresholds, dimensions and schedule.
    """

    def __init__(self, model: nn.Module, config: UBatchConfig) -> None:
        self.schedule = config.resolved_schedule()
        self._model = model
        self._config = config
        self._names = parameter_names(model.forward)
        self._suspects = [item for item in model.named_modules() if _is_suspect(item[1])]
        self._unmergeable: dict[tuple[object, ...], tuple[DeclineReason, str]] = {}

    def intent(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext | None) -> Intent:
        """What this rank would do with the call `module(*args, **kwargs)` under `context`.

        Raises:
            SplitError: `context` asks for a split that these arguments, or this module, do not allow.
        """
        if context is not None and context.ubatch_slices is not None:
            return self._requested(args, kwargs, context.ubatch_slices, context.mode)
        num_tokens = 0 if context is None else context.num_tokens
        mode = context.mode if context is not None and num_tokens else ForwardMode.PREFILL
        try:
            plan = plan_call(self._names, args, kwargs, self._config.split_dims)
            if plan.decode and not num_tokens:
                mode = ForwardMode.DECODE
            num_tokens = plan.num_tokens
            no = self._objection(plan, mode, args, kwargs, context)
            if no is not None:
                return self._no(*no, num_tokens, mode)
            bounds = even_bounds(plan.rows, self.schedule.lanes)
            tokens = [(rows.stop - rows.start) * plan.tokens_per_row for rows in bounds]
            return self._yes(plan, bounds, mode, self.schedule, tokens)
        except CannotSplit as cannot:
            return self._no(cannot.reason, str(cannot), num_tokens, mode)

    def remember_unmergeable(self, args: tuple[Any, ...], kwargs: dict[str, Any], cannot: CannotSplit) -> None:
        """The outputs of such a call could not be merged: do not try again."""
        self._unmergeable[self._call_key(args, kwargs)] = cannot.reason, str(cannot)

    def _requested(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], slices: Sequence[UBatchSlice], mode: ForwardMode
    ) -> Intent:
        plan = plan_call(self._names, args, kwargs, self._config.split_dims)
        bounds = _explicit_bounds(slices, plan)
        no = self._switched_off() or self._batch_dependence()
        if no is not None:
            raise CannotSplit(no[0], f"the forward context has ubatch_slices, but {no[1]}")
        schedule = self.schedule.with_lanes(len(slices))
        return self._yes(plan, bounds, mode, schedule, [part.num_tokens for part in slices])

    def _objection(
        self,
        plan: CallPlan,
        mode: ForwardMode,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ForwardContext | None,
    ) -> tuple[DeclineReason, str] | None:
        """Why this rank would rather not split a call that could be split; an idle rank has no objection."""
        config, lanes = self._config, self.schedule.lanes
        off = self._switched_off()
        if off is not None:
            return off
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
        known = self._unmergeable.get(self._call_key(args, kwargs))
        return known if known is not None else self._batch_dependence()

    def _switched_off(self) -> tuple[DeclineReason, str] | None:
        if not self._config.enable_dbo:
            return DeclineReason.DISABLED, "enable_dbo is off."
        if self.schedule.lanes == 1:
            return DeclineReason.SERIAL_SCHEDULE, f"schedule {self.schedule.name!r} has one lane."
        return None

    def _batch_dependence(self) -> tuple[DeclineReason, str] | None:
        """What makes a row's result depend on the other rows, or on the order of random numbers."""
        model = self._model
        for name, module in model.named_modules() if model.training else self._suspects:
            where = name or "the module"
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                return DeclineReason.BATCH_NORM_IN_TRAINING, f"{where} normalises over the whole batch."
            if module.training and any(rate > 0 for rate in _dropout_rates(module)):
                return DeclineReason.DROPOUT_IN_TRAINING, f"{where} drops out at random; call eval()."
        return None

    def _call_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
        """Calls with the same arguments present, and the same switches, have outputs of the same structure."""
        return (
            self._model.training,
            *map(_switch, args),
            *((name, _switch(value)) for name, value in sorted(kwargs.items()) if value is not None),
        )

    def _no(self, reason: DeclineReason, why: str, tokens: int, mode: ForwardMode) -> Intent:
        schedule = self.schedule
        offer = Offer(
            Wish.NO,
            (tokens,),
            schedule.lanes,
            reason,
            fingerprint(schedule.describe()),
            fingerprint(mode),
            graph_mode=0,
        )
        return Intent(offer, why, None, mode, tokens)

    def _yes(
        self, plan: CallPlan, bounds: Sequence[slice], mode: ForwardMode, schedule: Schedule, tokens: Sequence[int]
    ) -> Intent:
        offer = Offer(
            Wish.YES if any(tokens) else Wish.IDLE,
            tuple(tokens),
            schedule.lanes,
            None,
            fingerprint(schedule.describe()),
            fingerprint(mode),
            graph_mode=0,
        )
        split = CutCall(plan, tuple(bounds), *plan.cut(bounds))
        return Intent(offer, None, split, mode, sum(tokens))


def _explicit_bounds(slices: Sequence[UBatchSlice], plan: CallPlan) -> list[slice]:
    """Row ranges for the slices that a forward context asks for."""
    if not 2 <= len(slices) <= MAX_LANES:
        raise SplitError(
            f"ubatch_slices needs 2 to {MAX_LANES} slices, not {len(slices)}. Leave it None to run unsplit."
        )
    by_token = plan.tokens_per_row == 1 and not plan.decode
    bounds = [part.token_slice if by_token else part.request_slice for part in slices]
    rows, row = ("tokens", "token") if by_token else ("requests", "request")
    for lane, (start, part) in enumerate(zip([0, *(part.stop for part in bounds)], bounds, strict=False)):
        if part.start != start:
            raise SplitError(
                f"slice {lane} of ubatch_slices starts at {row} {part.start}, but the one before ends at {start}. "
                f"These arguments have one row per {row}, so every {row} must be in exactly one slice."
            )
    if bounds[-1].stop != plan.rows:
        raise SplitError(f"ubatch_slices cover {bounds[-1].stop} {rows}, but the arguments have {plan.rows} rows.")
    return bounds


def _switch(value: object) -> object:
    return value if value is None or isinstance(value, bool | str) else type(value)


def _is_suspect(module: nn.Module) -> bool:
    """Whether a module can depend on the whole batch."""
    return isinstance(module, _BatchNorm) or bool(_dropout_rates(module))


def _dropout_rates(module: nn.Module) -> list[float]:
    rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    return rates + [value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)]
