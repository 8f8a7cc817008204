"""Signatures, and the results of their proofs: two calls of a module with the same signature share a proof.

A signature has names, structure, classes, dtypes, numbers of dimensions, values, the split dimensions, mode, training,
gradients and autocast. It has no sizes, with one exception: lanes of a single row have their own signature, because a
module that squeezes treats them differently.

    bool, string, enum, function, 0, 1, -1, an infinity, NaN      by value
    any other number, also in a 0-dim tensor on a CPU             by value, until four were proved
    list of numbers with one entry per row                        by type
    tensor                                                        by class, attributes, dtype, dimensions
    other object                                                  by class, and its attributes by these rules; without
                                                                  any, such as a set or slice, by value

A signature is proved, with the rule that merges its outputs, or has failed, and why. Ordinary numbers are part of it
until calls with four different values were proved; then any value will do. So a flag or a scale proves for itself, and
a position that grows does not prove for ever. Where no value comes twice, such as the id of a request, calls run
unsplit after sixteen proofs.
"""

import functools
import math
import pickle
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit
from ubatch.calls.containers import FUNCTIONS, PLAIN, children_of, tensor_kind, tensors_in
from ubatch.calls.merging import ENOUGH, Rule
from ubatch.schedules.forward_context import ForwardMode
from ubatch.schedules.vote import DeclineReason

_SPECIAL = frozenset({0, 1, -1, math.inf, -math.inf})
_DEEP = 3
"""How deep attributes of objects are looked at."""
_LIMIT = 1024
"""Most signatures kept, so that a module called with new values each time does not fill the memory."""
_NEVER_TWICE = 16
"""Signatures that differ in values only, and of which none came twice, after which no more are proved."""
_MAY_BE_CHANCE = frozenset(
    {DeclineReason.ROWS_DEPEND, DeclineReason.LANE_FAILED, DeclineReason.CANNOT_PROVE}
    | {DeclineReason.DRAWS_RANDOM, DeclineReason.MODULE_KEEPS_STATE}
)
"""Reasons that may be chance: another thread may have drawn, and state that the first call initialises is harmless."""


class Signature(NamedTuple):
    """A call's signature.

    Attributes:
        base: everything but `numbers`.
        numbers: values of ordinary numbers, in order.
    """

    base: Hashable
    numbers: tuple[complex, ...]


def signature_of(plan: CallPlan, mode: ForwardMode, lanes: int, *, training: bool, trains: bool) -> Signature:
    """The signature of a call.

    Args:
        mode: what the step does.
        training: whether the module is in training mode.
        trains: whether gradients are recorded, and some tensor of the module requires them.
    """
    numbers: list[complex] = []
    named = *plan.named[: plan.positional], *sorted(plan.named[plan.positional :], key=itemgetter(0))
    base = (
        mode,
        training,
        trains,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.cuda.is_available() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        plan.rows // lanes == 1,
        tuple([(leaf.path, leaf.dim) for leaf in plan.leaves]),
        *[(name, _kind(name, value, plan, numbers)) for name, value in named],
    )
    return Signature(base, tuple(numbers))


def is_flag(value: object) -> bool:
    """Whether another value makes another call of it."""
    if isinstance(value, int | float | complex) and not isinstance(value, bool):
        return value != value or value in _SPECIAL
    return isinstance(value, PLAIN)


def _kind(path: str, value: Any, plan: CallPlan, numbers: list[complex], deep: int = 0) -> object:
    if isinstance(value, Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            return tensor_kind(value), value.dtype, value.requires_grad, _number(value.item(), numbers)
        return tensor_kind(value), value.dtype, value.dim(), value.requires_grad
    if isinstance(value, int | float | complex) and not isinstance(value, bool | Enum):
        return _number(value, numbers)
    if isinstance(value, MethodType):
        return value.__func__, _kind(path, value.__self__, plan, numbers, deep)
    if isinstance(value, functools.partial):
        return value.func, _kind(path, (value.args, value.keywords), plan, numbers, deep)
    if isinstance(value, (*PLAIN, *FUNCTIONS)):
        return type(value), value  # another function is another call
    children = children_of(value)
    if children is None:
        own = getattr(value, "__dict__", None)
        if splitter_for(value) is not None:
            return type(value)
        if own and deep < _DEEP and not isinstance(value, nn.Module) and not hasattr(value, "__slots__"):
            return type(value), *[(key, _kind("", child, plan, numbers, deep + 1)) for key, child in own.items()]
        return type(value), _value_of(value)
    if len(children) > 1 and isinstance(value, list | tuple):
        if any(leaf.path == path and leaf.dim is not None for leaf in plan.leaves):
            return type(value), frozenset(type(child) for _, child in children)
        if all(isinstance(child, Tensor) for _, child in children):  # as many as there may be
            kinds = {_kind("", child, plan, []) for _, child in children}
            return type(value), kinds.pop() if len(kinds) == 1 else frozenset(kinds)
    return type(value), *[(key, _kind(f"{path}.{key}", child, plan, numbers, deep)) for key, child in children]


def _value_of(value: Any) -> object:
    """What tells a value of any other class from another one: its pickled form, or itself where that cannot be had."""
    if isinstance(value, nn.Module) or any(True for _ in tensors_in(value)):
        return id(value)
    try:
        return pickle.dumps(value)
    except Exception:
        return id(value)


def _number(value: complex, numbers: list[complex]) -> object:
    if is_flag(value):
        return type(value), "nan" if value != value else value
    numbers.append(value)
    return type(value)


# --------------------------------------------------------------------------------------------------------- the table


@dataclass
class Standing:
    """The proof status of a signature.

    Attributes:
        rule: merges the outputs; None until it is proved.
        before: the rule of an earlier proof, if an output has another value than there.
        writes: paths of the arguments that the call writes to.
        retired: why it always runs unsplit, or None.
        strikes: number of failed proofs whose failure may have been chance.
        cuts: cuts of the last two proofs that passed.
        again: whether a call has come after the first one.
    """

    rule: Rule | None = None
    before: Rule | None = None
    writes: frozenset[str] = frozenset()
    retired: tuple[DeclineReason, str] | None = None
    strikes: int = 0
    cuts: tuple[int, ...] = ()
    again: bool = False


class ProofTable:
    """The signatures of one module."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all results, because the module was changed through its wrapper."""
        self._standings: OrderedDict[Hashable, Standing] = OrderedDict()
        self._proved: dict[Hashable, list[set[complex]]] = {}
        self._alike: dict[Hashable, deque[Standing]] = {}
        self._doubts, self._doubted = 0, ""

    def find(self, signature: Signature) -> Standing:
        """The status of a call's signature. To be asked once per call."""
        key = self._key(signature)
        standing = self._standings.get(key)
        if standing is not None:
            standing.again = True
            self._standings.move_to_end(key)
            return standing
        alike = self._alike.setdefault(_types_in(signature.base), deque(maxlen=_NEVER_TWICE))
        if len(alike) == _NEVER_TWICE and not any(each.again for each in alike):
            why = f"an argument had {_NEVER_TWICE} values, and none of them twice. Leave it out, or pass a tensor."
            return Standing(retired=(DeclineReason.CANNOT_PROVE, why))
        standing = self._standings[key] = Standing()
        alike.append(standing)
        if len(self._standings) > _LIMIT:
            self._standings.popitem(last=False)
            self._proved.clear()
        return standing

    def cuts_of(self, signature: Signature) -> tuple[int, ...]:
        """Where its last proof has cut the batch."""
        standing = self._standings.get(self._key(signature))
        return () if standing is None else standing.cuts[-1:]

    def _key(self, signature: Signature) -> Hashable:
        proved = self._proved.get(signature.base)
        if proved is None:
            return signature
        pairs = zip(signature.numbers, proved, strict=True)
        return signature.base, tuple(None if len(values) >= ENOUGH else number for number, values in pairs)

    def passed(self, signature: Signature, rule: Rule, *, cut: int, coarse: bool, writes: frozenset[str]) -> None:
        """Record a proof that passed."""
        key = self._key(signature)
        standing = self._standings.setdefault(key, Standing())
        standing.cuts = (*standing.cuts[-1:], cut)
        standing.writes, standing.strikes = writes, 0
        rule = rule if standing.before is None else rule.joined(standing.before)
        if not coarse or len(standing.cuts) > 1:
            standing.rule = rule
        proved = self._proved.setdefault(signature.base, [set() for _ in signature.numbers])
        for number, values in zip(signature.numbers, proved, strict=True):
            values.add(number)
        if self._key(signature) != key:
            self._standings[self._key(signature)] = replace(standing, rule=rule)

    def prove_again(self, signature: Signature) -> None:
        """An output has another value than in the proof: the next call is proved, too."""
        standing = self._standings.setdefault(self._key(signature), Standing())
        standing.before, standing.rule = standing.rule, None

    def failed(self, signature: Signature | None, reason: DeclineReason, why: str) -> None:
        """Record a failed proof: a signature that there is runs unsplit from now on, or after a second failure."""
        if signature is None:
            return
        standing = self._standings.setdefault(self._key(signature), Standing())
        standing.rule = None
        standing.strikes += 1
        if reason not in _MAY_BE_CHANCE or standing.strikes > 1:
            standing.retired = reason, why

    def doubt(self, changed: Sequence[str]) -> None:
        """Prove everything anew, because this of the module is not as it was. What failed is not tried again."""
        if not changed:
            return
        self._doubts += 1
        self._doubted = changed[0]
        self._proved.clear()
        for standing in self._standings.values():
            standing.rule, standing.cuts = None, ()

    def refuse_vain(self, standing: Standing) -> None:
        """Refuse what would be proved in vain, as the module is another one again and again; `CannotSplit` then."""
        if standing.rule is not None:
            self._doubts = max(0, self._doubts - 1)
        elif self._doubts >= _NEVER_TWICE:
            why = f"the module's {self._doubted!r} was changed between calls, time and again."
            raise CannotSplit(DeclineReason.MODULE_KEEPS_STATE, why)


def _types_in(base: object) -> Hashable:
    """A signature without its values."""
    return tuple(map(_types_in, base)) if type(base) is tuple else base if isinstance(base, type) else type(base)
