"""Whether this rank would overlap a call, and why not. Nothing runs here, and there is no vote.

In pseudo-code:
    the forward context says where to cut     -> cut there, or refuse by name
    the arguments cannot be cut               -> no: which argument, and what to do about it
    switched off, too small, not safe         -> no, with the reason
    a call of its signature failed its proof  -> no, with the proof's reason
    the mode's schedule has one lane          -> run unsplit, in chunks of experts
    otherwise                                 -> cut evenly; prove first, if its signature is not proved yet

The arguments are cut here, before the vote, because the vote must know whether they can be cut.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ubatch.calls.arguments import parameter_names, plan_call
from ubatch.calls.call_plan import CallPlan, CannotSplit, even_bounds
from ubatch.calls.containers import tensors_in
from ubatch.calls.merging import ENOUGH, Rule
from ubatch.errors import SplitError, UBatchError, describe
from ubatch.lanes.ambient import why_not_in_lanes
from ubatch.schedules.forward_context import ForwardContext, ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.split import UBatchSlice
from ubatch.schedules.vote import MAX_LANES, Decision, DeclineReason, Offer, Wish, fingerprint
from ubatch.wrapping.config import UBatchConfig, Verify
from ubatch.wrapping.effects.state import State
from ubatch.wrapping.guard import Guard
from ubatch.wrapping.proof_table import ProofTable, Signature, is_flag, signature_of
from ubatch.wrapping.step import Intent

_MOST_KEPT = 1024
"""Most changed attributes that are kept; with more, all are forgotten."""
_Learned = tuple[Signature | None, Rule | None, frozenset[str]]
"""What a proof has learned; see `Intent`."""


class Eligibility:
    """Decides for one module and its settings.

    Args:
        intercept: whether waits inside torch become points; gradients are then refused.

    Attributes:
        names: of the module's positional parameters; see `ubatch.calls.arguments.parameter_names`.
        proofs: results of the proofs.
        known: what the module kept when `state` last looked; None if nothing was learned yet.
    """

    def __init__(self, model: nn.Module, config: UBatchConfig, *, intercept: bool = False) -> None:
        self._intercept = intercept
        self._model = model
        self._config = config
        self.names = parameter_names(model.forward)
        self.proofs = ProofTable()
        self.forget()

    def intent(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext | None) -> Intent:
        """What this rank would do with the call `module(*args, **kwargs)` under `context`.

        Raises:
            SplitError: `context` asks for a split that these arguments, or this module, do not allow.
        """
        if context is not None and context.ubatch_slices is not None:
            return self._requested(self.plan(args, kwargs), context.ubatch_slices, context)
        if context is not None and context.decision is not None and context.decision.engaged:
            if context.decision.num_lanes > 1:
                raise SplitError("the forward context's decision says to overlap, but it has no ubatch_slices.")
            return self._requested_whole(args, kwargs, context)
        num_tokens = 0 if context is None else context.num_tokens
        mode = context.mode if context is not None and num_tokens else ForwardMode.PREFILL
        plan: CallPlan | None = None
        try:
            plan = self.plan(args, kwargs, tried=self._config.verify != Verify.OFF)
            if plan.decode and not num_tokens:
                mode = ForwardMode.DECODE
            num_tokens = plan.num_tokens
            self._refuse_unwanted(plan, mode, context)
            return self._provable(plan, mode)
        except CannotSplit as cannot:
            reason, why = cannot.reason, str(cannot)
        except UBatchError:
            raise
        except Exception as error:  # an argument that is not what it seems; the module may not mind
            reason, why = DeclineReason.CANNOT_PROVE, f"the call cannot be taken apart ({describe(error)})."
        schedule = self._config.for_mode(mode).schedule
        offer = _offer((num_tokens,), mode, schedule.lanes, schedule.fingerprint, reason, False)
        return Intent(offer, schedule, mode, plan, why)

    def settle(self, intent: Intent, decision: Decision) -> Intent:
        """The intent after the vote: a rank without tokens takes the lanes and schedule of the others.

        Raises:
            ConfigError: it does not have that schedule.
        """
        if intent.plan is None or intent.offer.wish is not Wish.IDLE or not decision.engaged:
            return intent
        schedule = self._config.agreed_schedule(decision, intent.mode)
        return intent if schedule == intent.schedule else self._even(intent.plan, intent.mode, schedule)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, tried: bool = False) -> CallPlan:
        """How the call can be split. `tried`: the split will be proved, so it may be guessed."""
        return plan_call(self.names, args, kwargs, self._config.split_dims, tried=tried)

    def forget(self) -> None:
        """Forget what was learned about the module, because it was changed through its wrapper."""
        modules = self._model.named_modules()
        self._suspects = [item for item in modules if isinstance(item[1], _BatchNorm) or _dropout_rates(item[1])]
        self.known: State | None = None
        self._changes = Counter[str]()
        self.proofs.clear()

    def state(self) -> State:
        """What the module keeps. If it is not as it was at the last call, everything has to be proved anew.

        Raises:
            CannotSplit: something in it cannot be read, so changes would go unseen.
        """
        state = self.known
        if state is not None and state.mark() and not self._is_usual("buffers", state):
            self.proofs.doubt(["buffers"])
        if state is None or (state.unreadable is None and state.moved()):
            changed = {} if state is None else state.changed_items()
            self.proofs.doubt([path for path, value in changed.items() if not self._is_usual(path, value)])
            if state is None or not state.renew():
                state = State.of_module(self._model)
            self.known = state
        if state.unreadable is not None:
            path, what = state.unreadable
            raise CannotSplit(DeclineReason.CANNOT_PROVE, f"the module's {path!r} is {what}.")
        return state

    def _is_usual(self, path: str, value: Any) -> bool:
        """Whether a change of the module between calls tells nothing new: of `training`, which is part of a signature,
        and of a number or object that has changed often, such as the number of a step."""
        if path.rpartition(".")[2] == "training":
            return True
        if len(self._changes) >= _MOST_KEPT:
            self._changes.clear()
        self._changes[path] += 1
        return self._changes[path] > ENOUGH and not is_flag(value)

    def guard(self, intent: Intent, neighbours: Callable[[], int]) -> Guard:
        """The guard of a call that is about to run in lanes. `neighbours`: see `Guard`."""
        call = State.of_call(intent.parts.plan.named, intent.calls)
        return Guard(self.known or self.state(), call, intent.writes, neighbours)

    def _provable(self, plan: CallPlan, mode: ForwardMode) -> Intent:
        """The intent of a call that is to overlap, with its proof's result: the merge rule; or a request for a proof if
        there is none yet. A rank without rows has nothing to prove, and merges nothing.

        Raises:
            CannotSplit: its proof failed, or would.
        """
        schedule, verify = self._config.for_mode(mode).schedule, self._config.verify
        if schedule.lanes == 1:
            return self._even(plan, mode, schedule)
        if verify == Verify.OFF or not plan.rows:
            self.state()  # which the guard compares with
            return self._even(plan, mode, schedule)
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in self._model.parameters())
        signature = signature_of(plan, mode, schedule.lanes, training=self._model.training, trains=trains)
        standing = self.proofs.find(signature)
        if standing.retired is not None:
            raise CannotSplit(*standing.retired)
        self.state()  # may doubt the proof
        self.proofs.refuse_vain(standing)
        if standing.writes:
            plan.refuse_shared_memory()
        return self._even(plan, mode, schedule, (signature, standing.rule, standing.writes))

    def _requested(self, plan: CallPlan, slices: Sequence[UBatchSlice], context: ForwardContext) -> Intent:
        bounds, mode = _explicit_bounds(slices, plan), context.mode
        schedule = context.schedule or self._config.for_mode(mode).schedule
        try:
            _refuse(self._config.switched_off(schedule))
            self._refuse_lanes(plan)
        except CannotSplit as no:
            raise CannotSplit(no.reason, f"the forward context has ubatch_slices, but {no}") from None
        self.state()  # which the guard compares with
        schedule, (calls, parts) = schedule.with_lanes(len(slices)), plan.cut(bounds)
        tokens = tuple([part.num_tokens for part in slices])
        offer = _offer(tokens, mode, schedule.lanes, schedule.fingerprint, None, False)
        return Intent(offer, schedule, mode, plan, calls=calls, parts=parts)

    def _requested_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext) -> Intent:
        """The intent of a call whose context already has the decision for single-batch overlap."""
        schedule = context.schedule or self._config.for_mode(context.mode).schedule
        if not schedule.single_batch:
            raise SplitError(
                f"the forward context's decision says to overlap in one lane, but schedule {schedule.name!r} has "
                f"{schedule.lanes} lanes and {schedule.chunks} chunks. Give the context the schedule that was agreed."
            )
        try:
            plan = self.plan(args, kwargs)
        except CannotSplit:  # nothing is cut
            plan = None
        offer = _offer((context.num_tokens,), context.mode, 1, schedule.fingerprint, None, False)
        return Intent(offer, schedule, context.mode, plan, single=True)

    def _refuse_unwanted(self, plan: CallPlan, mode: ForwardMode, context: ForwardContext | None) -> None:
        """Refuse a call that could be split, but which this rank does not want to split; none of an idle rank.

        Raises:
            CannotSplit: overlap is off, or not asked for; or the call is too small, or must not run in lanes.
        """
        schedule, idle = self._config.for_mode(mode).schedule, plan.rows == 0 and self._config.group is not None
        _refuse(self._config.switched_off(None if idle else schedule))
        if context is not None and context.attn_metadata is not None:
            why = "the forward context has attention metadata but no ubatch_slices: its caller wants one batch."
            raise CannotSplit(DeclineReason.NOT_REQUESTED, why)
        if idle:
            return
        _refuse(self._config.below_threshold(mode, plan.num_tokens))
        if schedule.lanes == 1:
            return
        if plan.rows < schedule.lanes:
            why = f"{plan.rows} rows leave a lane of {schedule.lanes} empty."
            raise CannotSplit(DeclineReason.LAST_UBATCH_EMPTY, why)
        self._refuse_lanes(plan)

    def _refuse_lanes(self, plan: CallPlan) -> None:
        """Refuse a call of which it is known without running it that it must not run in lanes.

        Raises:
            CannotSplit: the module cannot stop at points, has its batch in another dimension, mixes its rows, or draws
                random numbers; the caller's modes stay in its thread; intercepted collectives would need gradients.
        """
        model = self._model
        if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            why = "the module is compiled by torch.jit, so no lane can stop at a point in it."
            raise CannotSplit(DeclineReason.JIT_MODULE, why)
        for leaf in plan.leaves:
            if leaf.dim == 0 and leaf.path not in self._config.split_dims and _is_sequence_first(model):
                why = f"{type(model).__name__} has batch_first=False, so dimension 0 of {leaf.path!r} is the sequence. "
                raise CannotSplit(DeclineReason.SEQUENCE_FIRST, f"{why}Say split_dims={{{leaf.path!r}: 1}}.")
        _refuse(why_not_in_lanes())
        for name, module in model.named_modules() if model.training else self._suspects:
            where = name or "the module"
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise CannotSplit(DeclineReason.BATCH_NORM_IN_TRAINING, f"{where} normalises over the whole batch.")
            if module.training and any(rate > 0 for rate in _dropout_rates(module)):
                raise CannotSplit(DeclineReason.DROPOUT_IN_TRAINING, f"{where} drops out at random; call eval().")
        if self._intercept and torch.is_grad_enabled():
            given = tensors_in([value for _, value in plan.named])
            if any(tensor.requires_grad for tensor in itertools.chain(given, model.parameters())):
                why = "torch's collectives in lanes carry no gradients. Run under torch.no_grad(), or train unsplit."
                raise CannotSplit(DeclineReason.GRADIENTS, why)

    def _even(
        self, plan: CallPlan, mode: ForwardMode, schedule: Schedule, learned: _Learned = (None, None, frozenset())
    ) -> Intent:
        """The intent of a call that is cut evenly, or runs as one lane."""
        lanes, schedule_print = schedule.lanes, schedule.fingerprint
        if lanes == 1:
            offer = _offer((plan.num_tokens,), mode, lanes, schedule_print, None, False)
            return Intent(offer, schedule, mode, plan, single=True)
        calls, parts = plan.cut(even_bounds(plan.rows, lanes))
        signature, rule, _ = learned
        unproved = signature is not None and (rule is None or self._config.verify == Verify.ALWAYS)
        tokens = tuple([rows * plan.tokens_per_row for rows in parts.rows])
        offer = _offer(tokens, mode, lanes, schedule_print, None, unproved)
        return Intent(offer, schedule, mode, plan, None, False, calls, parts, *learned)


@functools.lru_cache(1024)
def _offer(
    tokens: tuple[int, ...], mode: ForwardMode, lanes: int, schedule: int, reason: DeclineReason | None, unproved: bool
) -> Offer:
    """A no where there is a `reason`; else a yes, or idle if there are no tokens. `schedule`: its fingerprint."""
    wish = Wish.NO if reason is not None else Wish.YES if any(tokens) else Wish.IDLE
    return Offer(wish, tokens, lanes, reason, schedule, fingerprint(mode), unproved=unproved)


def _refuse(no: tuple[DeclineReason, str] | None) -> None:
    """Raise `CannotSplit` for a reason and its message."""
    if no is not None:
        raise CannotSplit(*no)


def _explicit_bounds(slices: Sequence[UBatchSlice], plan: CallPlan) -> list[slice]:
    """Row ranges for the slices that a forward context asks for."""
    if not 2 <= len(slices) <= MAX_LANES:
        what = f"ubatch_slices needs 2 to {MAX_LANES} slices, not {len(slices)}."
        raise SplitError(f"{what} Leave it None to run unsplit.")
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


def _is_sequence_first(module: nn.Module) -> bool:
    """Whether this is a torch module with `batch_first=False`: its arguments' batch is dimension 1."""
    if isinstance(module, nn.Sequential) and len(module):
        return _is_sequence_first(module[0])
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        module = module.layers[0]
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        module = module.self_attn
    return isinstance(module, nn.Transformer | nn.MultiheadAttention | nn.RNNBase) and not module.batch_first


def _dropout_rates(module: nn.Module) -> list[float]:
    rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    return rates + [value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)]
