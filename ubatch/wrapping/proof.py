"""The proof: the first call of a signature that would overlap runs unsplit, then in lanes; the results are compared.

    copy everything that the call could write to; in a small batch rows are repeated
    run unsplit, on the real arguments                this result is returned to the caller
    it wrote to the module, or drew random numbers    the call is over; nothing runs twice
    ranks: all continue, or none does
    run the copies in two lanes of unequal size
    learn how the outputs merge (`merging`); compare values, arguments, caches (`closeness`) and the module's state
    put back what only the lanes have changed
    ranks: all found them equal, or none overlaps
    16 bits, and single rows are off: run other copies with another cut; the same rows off again depend on others

The lanes differ in size from each other and from every other size of the call, so nothing matches by chance. A
signature in 16 bits is proved by two calls with different cuts. A signature that fails runs unsplit from then on: at
once, or after a second failure (`proof_table`), because unequal values may be chance and many modules initialise state
in their first call.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ubatch.calls.call_plan import CallPlan, CannotSplit, LaneParts
from ubatch.calls.closeness import Comparison, Unequal, identical
from ubatch.calls.containers import children_of
from ubatch.calls.merging import Learner, Rule
from ubatch.errors import GroupBroken, PeerFailed, SideEffectError
from ubatch.schedules.vote import Decision, DeclineReason, Offer, Wish
from ubatch.trace.spans import current_trace, tracing
from ubatch.wrapping.effects.random_state import RandomState, busy_threads
from ubatch.wrapping.effects.state import State
from ubatch.wrapping.execution import Execution
from ubatch.wrapping.guard import HAND_OVER
from ubatch.wrapping.proof_table import ProofTable
from ubatch.wrapping.step import Intent, Step

_No = tuple[DeclineReason, str]
_MORE_ROWS = 64
"""How many numbers of repeated rows are tried, and how many cuts on each side of the middle."""
_APART = ((210, 0), (6, 0), (6, 8), (1, _MORE_ROWS))
"""What the place of the cut shall have no divisor in common with, and with how many more rows: a cut between groups of
two or three rows would not show that they belong together."""


class _Rehearsal(NamedTuple):
    """The call in lanes, on copies.

    Attributes:
        plan: plan of the copies.
        order: row numbers of the call that the copies have.
        cut: the first row of the second lane.
    """

    plan: CallPlan
    order: Sequence[int]
    cut: int


class Proof:
    """One proof.

    Args:
        step: a call that would overlap, and whose signature is not proved.
        neighbours: see `Guard`.

    Attributes:
        no: after `run`, why the signature is not proved: the reason, and a sentence where one is known; None if it
            passed.
        declined_by: the first rank that declined, or None.
        seconds: time of the proof, without the call itself.
    """

    def __init__(self, execution: Execution, table: ProofTable, step: Step, neighbours: Callable[[], int]) -> None:
        self._execution, self._model, self._table = execution, execution.model, table
        self._step, self._neighbours, self._begun = step, neighbours, neighbours()
        self._signature, self._plan = step.intent.signature, step.intent.parts.plan
        self._coarse = False
        self._used = () if self._signature is None else table.cuts_of(self._signature)
        self._rehearsals: list[_Rehearsal] = []
        self._writes: frozenset[str] = frozenset()
        self._left: str | None = None
        self._rule: Rule | None = None
        self._comparisons: list[Comparison] = []
        self.no: _No | None = None
        self.declined_by: int | None = None
        self.seconds = 0.0

    def run(self) -> Any:
        """Run the call unsplit, and prove its signature. Returns the call's result.

        Raises:
            SideEffectError: the lanes changed what cannot be put back.
            Exception: the call's own error in its unsplit run; or an error of `CommGroup.reset`, if a lane failed on
                some rank.
        """
        begun = time.monotonic()
        self._prepare()
        started = time.monotonic()
        result = self._execution.call(replace(self._step, decision=self._step.decision.whole()))
        ended = time.monotonic()
        self._rehearse(result)
        self.seconds = time.monotonic() - ended + started - begun
        return result

    def _prepare(self) -> None:
        """Before the call: copy its arguments, and take snapshots of everything that it may change."""
        self._random = RandomState()
        with self._noting("what it could change is not known"):
            self._coarse = _is_coarse(self._model, self._plan)
            for _ in range(2 if self._coarse else 1):  # all made now, as the call may write to its arguments
                self._rehearsals.append(self._copies())
            self._call = State.of_call(self._plan.named, thorough=True)
            self._module = State.of_module(self._model, thorough=True)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note an error in the `with` block as a no, and say `what` an unknown one means. It concerns only the proof,
        so it must not reach the caller, and the other ranks wait for this one."""
        try:
            yield
        except CannotSplit as cannot:
            self.no = cannot.reason, str(cannot)
        except Unequal as unequal:
            self.no = (
                DeclineReason.ROWS_DEPEND,
                f"{unequal}: what one row gives depends on the others, or on where the batch is cut. If it is cut "
                "along the wrong dimension, say the right one in split_dims.",
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.no = DeclineReason.CANNOT_PROVE, f"there is no memory for a copy of the arguments ({error})."
        except Exception as error:
            self.no = DeclineReason.CANNOT_PROVE, f"{what} ({type(error).__name__}: {error})."

    def _copies(self) -> _Rehearsal:
        plan = self._plan
        if not plan.rows:
            return _Rehearsal(plan, (), 0)
        rows, cut = _cut_of(plan, self._step.intent, self._used)
        self._used = (*self._used, cut)
        order = _order_of(plan.rows, rows, cut)
        return _Rehearsal(plan.copied(order if rows > plan.rows else None), order, cut)

    def _rehearse(self, result: Any) -> None:
        """After the call: run it in lanes and compare, if all ranks agree."""
        agreed, signature = self._step.decision, self._signature
        if self.no is None:
            with self._noting("what it changed is not known"):
                self._refuse_side_effects()
        if self.no is not None:
            agreed = self._agree(self._step.intent)
        for rehearsal in self._rehearsals if self.no is None else ():
            intent = self._intent_of(rehearsal)
            agreed = self._agree(intent)
            if not agreed.engaged or not intent.calls:
                break
            failed: BaseException | None = None
            try:
                self._in_lanes(replace(self._step, intent=intent, decision=agreed), rehearsal, result)
            except BaseException as error:
                failed = error
            self._put_back()
            agreed = self._agree_after(intent, failed)
            if not agreed.prove:
                break
        if self.no is not None:
            self._table.failed(signature, *self.no)
        elif agreed.engaged:
            if self._rule is not None and signature is not None:
                cut = self._rehearsals[0].cut
                self._table.passed(signature, self._rule, cut=cut, coarse=self._coarse, writes=self._writes)
            return
        self.no = self.no or (agreed.reason or DeclineReason.PEER_DECLINED, "")
        self.declined_by = agreed.declined_by

    def _refuse_side_effects(self) -> None:
        """Refuse side effects of the unsplit call that lanes cannot have.

        Raises:
            CannotSplit: it had one, or wrote to what cannot be told apart.
        """
        unreadable = self._call.unreadable
        if unreadable is not None:
            raise CannotSplit(DeclineReason.CANNOT_PROVE, f"argument {unreadable[0]!r} is {unreadable[1]}.")
        changed = self._module.changes()
        if changed:
            why = f"the module changed {changed[0]!r} in the call. "
            raise CannotSplit(DeclineReason.MODULE_KEEPS_STATE, why + HAND_OVER)
        if self._random.moved():
            why = "the call drew random numbers, and lanes would draw others. Draw them outside the wrapped module."
            raise CannotSplit(DeclineReason.DRAWS_RANDOM, why)
        if self._call.changed_items():
            why = "the call changed a container that it was given. Return what it adds or removes instead."
            raise CannotSplit(DeclineReason.ARGUMENTS_CHANGED, why)
        self._writes = frozenset(self._call.written_tensors())
        if self._writes:
            self._plan.refuse_shared_memory()
        given = (leaf.value for leaf in self._plan.leaves if isinstance(leaf.value, Tensor))
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in (*self._model.parameters(), *given))
        if self._writes and trains:
            raise CannotSplit(
                DeclineReason.GRADIENTS,
                "the call writes to its arguments and records gradients: to torch, the lanes' parts are one tensor, "
                "which the second lane changes after the first has saved it. Write to a new tensor.",
            )
        self._call = State.of_call(self._plan.named)
        self._others = busy_threads()

    def _look(self) -> None:
        """At a hand-over: note what the lane leaves on the module for later, which other lanes would overwrite."""
        if self._left is None and self._module.moved():
            self._left = next(iter(self._module.changed_items()), None)

    def _put_back(self) -> None:
        """Put back what only the lanes have changed, and note what that was. Nothing is put back if another thread was
        in a call meanwhile, no random state if one was at work.

        Raises:
            SideEffectError: something cannot be put back.
        """
        changed, drawn = self._left or next(iter(self._module.changes()), None), self._random.moved()
        if self._neighbours() == self._begun:
            if drawn and busy_threads() == self._others:
                self._random.restore()
            lost = [*(self._module.restore() if changed else ()), *self._call.restore()]
            if lost:
                raise SideEffectError(
                    f"in a proof, the lanes changed {lost[0]!r}, which the whole call leaves alone, and of which there "
                    'is no copy. Do not wrap this module, or set verify="off" if the change does no harm.'
                )
        if self.no is None and changed is not None:
            self.no = DeclineReason.MODULE_KEEPS_STATE, f"the module changed {changed!r}, in lanes only."
        elif self.no is None and drawn:
            self.no = DeclineReason.DRAWS_RANDOM, "random numbers were drawn while the call ran in lanes."

    def _intent_of(self, rehearsal: _Rehearsal) -> Intent:
        plan, whole = rehearsal.plan, self._step.intent
        try:
            calls, parts = plan.cut([slice(0, rehearsal.cut), slice(rehearsal.cut, plan.rows)])
        except Exception as error:  # a splitter may raise any error, and the other ranks wait for this one
            reason = error.reason if isinstance(error, CannotSplit) else DeclineReason.NO_SPLITTER
            self.no = self.no or (reason, str(error))
            return replace(whole, calls=())
        schedule, tokens = whole.schedule.with_lanes(2), tuple([rows * plan.tokens_per_row for rows in parts.rows])
        wish = Wish.YES if any(tokens) else Wish.IDLE
        offer = Offer(wish, tokens, 2, None, schedule.fingerprint, whole.offer.mode)
        return replace(whole, offer=offer, schedule=schedule, calls=calls, parts=parts, plan=plan)

    def _agree(self, intent: Intent) -> Decision:
        """Vote whether all ranks continue, and whether with another cut."""
        explained = not self._comparisons or not self._comparisons[-1].off
        offer = replace(intent.offer, unproved=len(self._comparisons) == 1 and not explained)
        if self.no is not None:
            offer = Offer(Wish.NO, (sum(offer.tokens),), offer.lanes, self.no[0])
        return self._execution.vote(offer)

    def _in_lanes(self, step: Step, rehearsal: _Rehearsal, result: Any) -> None:
        """Run the copies in lanes, and note the first difference from the unsplit call."""
        kept = [(tensor, tensor.detach().clone()) for tensor in _results_in(result)]
        with nullcontext() if current_trace() is None else tracing():  # keeps this run out of the caller's trace
            outputs = self._execution.outputs(step, at_handover=self._look)
        overwritten = [(tensor, was) for tensor, was in kept if not identical(tensor, was)]
        if overwritten:
            with torch.inference_mode():  # inference mode allows writes to any tensor
                for tensor, was in overwritten:
                    tensor.copy_(was)
            why = "the module writes its result into memory that it uses again. Return a new tensor."
            self.no = DeclineReason.MODULE_KEEPS_STATE, why
        elif self._plan.rows:
            with self._noting("its result cannot be compared"):
                self._compare(rehearsal, step.intent.parts, result, outputs)

    def _compare(self, rehearsal: _Rehearsal, parts: LaneParts, result: Any, outputs: Sequence[Any]) -> None:
        """Learn how the outputs merge.

        Raises:
            CannotSplit: the outputs cannot be merged.
            Unequal: the results differ.
        """
        compare = Comparison(self._coarse, rehearsal.order, rehearsal.cut)
        learner = Learner(compare, parts, self._plan, self._execution.config.output_dims)
        self._rule = learner.learn("output", result, outputs)
        parts.merge_caches()
        for leaf, copied in zip(self._plan.leaves, rehearsal.plan.leaves, strict=True):
            learner.check(leaf._replace(path=f"argument {leaf.path!r}"), copied.value)
        self._comparisons.append(compare)
        if len(self._comparisons) > 1 or not self._coarse:
            coupled = self._comparisons[0].coupled(compare)
            if coupled is not None:
                raise Unequal(f"single rows of {coupled} are off, whichever way the batch is cut")

    def _agree_after(self, intent: Intent, failed: BaseException | None) -> Decision:
        """Vote again after the lanes have run, or handle their error, of this rank or another one. Lanes that failed
        have launched what has no counterpart on the peers.

        Raises:
            BaseException: `failed`, if it is no `Exception`.
        """
        group, error = self._execution.config.group, failed
        try:
            if error is None:
                return self._agree(intent)
        except Exception as late:
            error = late
        if not isinstance(error, Exception):
            raise error
        if group is not None and group.size > 1:
            group.recover(f"{type(error).__name__}: {error}")
        if isinstance(error, PeerFailed | GroupBroken):
            return Decision(False, DeclineReason.PEER_DECLINED, getattr(error, "rank", None), ((0,),))
        self.no = (
            DeclineReason.LANE_FAILED,
            f"{type(error).__name__}: {error} (raised in a lane, where the whole call raised nothing). A module may "
            "need the whole batch, or its arguments another split_dims.",
        )
        return Decision(False, DeclineReason.LANE_FAILED, None, ((0,),))


def _cut_of(plan: CallPlan, intent: Intent, used: Sequence[int]) -> tuple[int, int]:
    """Number of rows of the copies, and the cut: both lanes get sizes that no other dimension of the call has.

    Raises:
        CannotSplit: there are no such sizes.
    """
    taken = {size for leaf in plan.leaves for size in leaf.sizes_beside()}
    single = plan.rows // intent.schedule.lanes == 1  # lanes of a single row are proved with single-row lanes
    for divisors, more in _APART:
        for rows in range(max(plan.rows, 3), max(plan.rows, 3) + more + 1):
            near = range(max(2, rows // 2 - _MORE_ROWS), min(rows - 1, rows // 2 + _MORE_ROWS))
            cuts = [1, rows - 1] if single else sorted(near, key=lambda cut: (abs(2 * cut - rows), cut))
            for cut in cuts:
                chance = (taken - {1} if single else taken) & {cut, rows - cut}
                if 2 * cut != rows and cut not in used and not chance and (single or math.gcd(cut, divisors) == 1):
                    return rows, cut
    why = "the call has too many different sizes to tell its rows from. Use another batch size."
    raise CannotSplit(DeclineReason.CANNOT_PROVE, why)


def _order_of(rows: int, copies: int, cut: int) -> list[int]:
    """Row number of the call for each row of the copies. Each lane repeats only its own rows, so that a dependence on a
    row of the other lane shows."""
    if copies == rows:
        return list(range(rows))
    first = 1 if cut == 1 else rows - 1 if copies - cut == 1 else rows // 2
    return [row % first for row in range(cut)] + [first + row % (rows - first) for row in range(copies - cut)]


def _is_coarse(model: nn.Module, plan: CallPlan) -> bool:
    """Whether the call computes in 16 bits or fewer: under autocast, with most of its weights, or, if it has none, with
    an argument."""
    if torch.is_autocast_enabled("cpu") or (torch.cuda.is_available() and torch.is_autocast_enabled("cuda")):
        return True
    weights = [each for each in model.parameters() if each.is_floating_point()]  # lazy ones raise below
    given = [leaf.value for leaf in plan.leaves if isinstance(leaf.value, Tensor) and leaf.value.is_floating_point()]
    low = [each.numel() for each in weights or given if each.element_size() < 4]
    return 2 * sum(low) > sum(each.numel() for each in weights) if weights else bool(low)


def _results_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result] if result.layout is torch.strided and not result.is_nested else []
    return [tensor for _, child in children_of(result) or () for tensor in _results_in(child)]
