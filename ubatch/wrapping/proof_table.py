"""Results of the proofs per signature: proved, with the rule that merges its outputs, or failed, and why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ubatch.calls.closeness import Comparison
from ubatch.calls.merging import Rule
from ubatch.schedules.vote import DeclineReason

__all__ = ["ProofTable", "Standing"]

_LIMIT = 1024
"""Most signatures kept, so that a module called with a new string each time does not fill the memory."""
_MAY_BE_CHANCE = frozenset(
    {
        DeclineReason.ROWS_DEPEND,
        DeclineReason.LANE_FAILED,
        DeclineReason.CANNOT_PROVE,
        DeclineReason.MODULE_KEEPS_STATE,  # state initialised once, in the first call, is harmless
    }
)


@dataclass
class Standing:
    """The proof status of a signature.

    Attributes:
        rule: merges the outputs; None until it is proved.
        writes: whether the call writes to its arguments.
        retired: why it always runs unsplit, or None.
        strikes: number of failed proofs whose failure may have been chance.
        cuts: cuts of the last two proofs that passed.
        beside: leaves that differed next to the cut in the last one.
    """

    rule: Rule | None = None
    writes: bool = False
    retired: tuple[DeclineReason, str] | None = None
    strikes: int = 0
    cuts: tuple[int, ...] = ()
    beside: frozenset[str] = frozenset()


class ProofTable:
    """The signatures of one module."""

    def __init__(self) -> None:
        self._standings: OrderedDict[Hashable, Standing] = OrderedDict()

    def find(self, signature: Hashable) -> Standing:
        """The status of a signature."""
        standing = self._standings.get(signature)
        if standing is None:
            standing = self._standings[signature] = Standing()
            if len(self._standings) > _LIMIT:
                self._standings.popitem(last=False)
        else:
            self._standings.move_to_end(signature)
        return standing

    def cuts_of(self, signature: Hashable) -> Sequence[int]:
        """Where its earlier proofs have cut the batch."""
        return self.find(signature).cuts[-1:]

    def passed(
        self, signature: Hashable, rule: Rule, compare: Comparison, *, writes: bool
    ) -> tuple[DeclineReason, str] | None:
        """Record a proof that passed. Returns why the signature fails anyway, together with an earlier proof; else
        None."""
        standing = self.find(signature)
        off = standing.beside & compare.beside
        if off:
            return (
                DeclineReason.ROWS_DEPEND,
                f"{min(off)} is off beside the cut, wherever the batch is cut: a row depends on the one before or "
                "behind it.",
            )
        standing.cuts = (*standing.cuts[-1:], compare.cut)
        standing.beside = frozenset(compare.beside)
        standing.writes = writes
        if not compare.coarse or len(standing.cuts) > 1:
            standing.rule = rule
        return None

    def failed(self, signature: Hashable, reason: DeclineReason, why: str) -> None:
        """Record a failed proof: the signature runs unsplit from now on, or after a second failure."""
        standing = self.find(signature)
        standing.rule = None
        standing.strikes += 1
        if reason not in _MAY_BE_CHANCE or standing.strikes > 1:
            standing.retired = reason, why

    def clear(self) -> None:
        """Forget all results, because the module was changed."""
        self._standings.clear()
