"""`UBATCH_CHECK_ORDER=1`: do all ranks launch the same transfers in the same order?

They must, or a transport pairs one rank's dispatch with another one's combine: a hang at best, wrong numbers at worst.
Lanes keep the order if they pass the same points on every rank, but not if a module's points depend on its data. If the
variable is set on every rank, each launch is noted (lane, name, dtype and row shape; the number of rows may differ),
and the next vote compares a hash of the notes. A difference raises on every rank, with the first launch that differs.
If a step fails or hangs before the vote, its error names the difference.

For debugging: it costs a few microseconds per launch. Launches in a captured graph are noted when it is
captured, not when it is replayed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from ubatch.errors import LaunchOrderError

VARIABLE = "UBATCH_CHECK_ORDER"
BALLOT_WIDTH = 3
"""Numbers that a rank adds to its vote: whether it checks, how many launches, their hash."""
_SHOWN = 3


class LaunchOrder:
    """This rank's launches since the last vote."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def note(self, lane: int, name: str, x: Tensor) -> None:
        """Note that `name` is launched with rows like those of `x`, in `lane` (-1: outside lanes)."""
        row = ", ".join(["*", *map(str, x.shape[1:])])
        where = f"lane {lane}" if lane >= 0 else "no lane"
        self.launches.append(f"{where}: {name} {str(x.dtype).removeprefix('torch.')} [{row}]")

    def ballot(self) -> list[int]:
        """The `BALLOT_WIDTH` numbers to add to the vote."""
        digest = hashlib.blake2b("\n".join(self.launches).encode(), digest_size=7).digest()
        return [1, len(self.launches), int.from_bytes(digest, "big")]


def check_ballots(ballots: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks launched the same.

    Args:
        ballots: one per rank; zeros for a rank that does not check.

    Raises:
        LaunchOrderError: some ranks check, others do not.
    """
    checking = [bool(ballot[0]) for ballot in ballots]
    if len(set(checking)) > 1:
        raise LaunchOrderError(
            f"{VARIABLE}=1 is set on ranks {[rank for rank, checks in enumerate(checking) if checks]} of the group "
            "only. Set it on all of them, or on none."
        )
    return len({tuple(ballot) for ballot in ballots}) == 1


def first_difference(orders: Mapping[int, Sequence[str]], *, ended: bool = True) -> str | None:
    """A description of the first launch that differs between ranks; None if none does.

    Args:
        orders: rank -> its launches, in order.
        ended: whether the step completed; if not, a rank that merely stopped earlier does not count as different.
    """
    ranks = sorted(orders)
    together = zip_longest if ended else zip
    for number, launches in enumerate(together(*(orders[rank] for rank in ranks))):
        if len(set(launches)) > 1:
            lines = [f"the ranks launched in different orders; the first {number} launches are the same, then:"]
            for rank in ranks:
                following = list(orders[rank][number : number + _SHOWN]) or ["nothing"]
                lines.append(f"  rank {rank} ({len(orders[rank])} launches): {'; '.join(following)}")
            return "\n".join(lines)
    return None
