"""Results of the proofs per signature: proved, with the rule that merges its outputs, or failed, and why.

Ordinary numbers in a signature are part of it until calls with four different values were proved; then any value will
do. So a flag or a scale proves for itself, and a position that grows does not prove for ever. Where no value comes
twice, such as the id of a request, calls run unsplit after sixteen proofs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ubatch.calls.call_plan import CannotSplit
from ubatch.calls.merging import Rule
from ubatch.schedules.vote import DeclineReason
from ubatch.wrapping.signature import Signature

__all__ = ["OFTEN", "ProofTable", "Standing"]

_LIMIT = 1024
"""Most signatures kept, so that a module called with new values each time does not fill the memory."""
OFTEN = 4
"""Different values with which calls must be proved before any value will do."""
_NEVER_TWICE = 16
"""Signatures that differ in values only, and of which none came twice, after which no more are proved."""
_MAY_BE_CHANCE = frozenset(
    {
        DeclineReason.ROWS_DEPEND,
        DeclineReason.LANE_FAILED,
        DeclineReason.CANNOT_PROVE,
        DeclineReason.DRAWS_RANDOM,  # another thread may have drawn
        DeclineReason.MODULE_KEEPS_STATE,  # state initialised once, in the first call, is harmless
    }
)


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
        return signature.base, tuple(None if len(values) >= OFTEN else number for number, values in pairs)

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
