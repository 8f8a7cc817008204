"""Which lane runs next: the baton's rules, without threads.

    A lane that reaches an active point hands the baton to the next living lane of the ring,
    except that lane 0 keeps it through its first `lead` points.
    A lane that ends leaves the ring and hands the baton on.
    The last lane left keeps it.

            point, others alive, lead over          end
    RUNS(i) --------------------------------> RUNS(next living after i) ---> ... ---> EMPTY

The rules know nothing of time, data or errors, so for a given schedule the interleaving is known before it
runs. `Baton` drives this table from threads, `simulate` from a list; a test compares the two.
"""

from collections.abc import Sequence


class Ring:
    """The transition table for `lanes` lanes; `holder` is the lane that may run, -1 when all have ended."""

    __slots__ = ("_successor", "alive", "holder", "lanes", "lead", "passed")

    def __init__(self, lanes: int, lead: int = 0) -> None:
        self.lanes = lanes
        self.reset(lead)

    def reset(self, lead: int) -> None:
        """Back to the start: every lane alive, lane 0 holds the baton, no point passed."""
        self.lead = lead
        self.alive = [True] * self.lanes
        self.passed = [0] * self.lanes
        self._successor = [(lane + 1) % self.lanes for lane in range(self.lanes)]
        self.holder = 0

    def at_point(self, lane: int) -> int:
        """`lane`, holding the baton, passes an active point; returns the lane that runs next."""
        passed = self.passed[lane]
        self.passed[lane] = passed + 1
        if lane == 0 and passed < self.lead:
            return lane
        self.holder = self._successor[lane]
        return self.holder

    def at_end(self, lane: int) -> int:
        """`lane`, holding the baton, ends; returns the lane that runs next, or -1."""
        self.alive[lane] = False
        following = self._successor[lane]
        for other in range(self.lanes):
            if self._successor[other] == lane:
                self._successor[other] = following
        self.holder = following if following != lane else -1
        return self.holder


def interleave(programs: Sequence[Sequence[str]], *, lead: int = 0) -> list[tuple[int, str]]:
    """The order in which lanes run their stages.

    Args:
        programs: for every lane, the active points it passes, in order. Lanes may differ in length.
        lead: how many points lane 0 passes before the first hand-off.

    Returns:
        `(lane, point)` for every stage, in running order; a stage is named by the point that ends it, and a
        lane's last stage by `"end"`.
    """
    ring = Ring(len(programs), lead)
    order: list[tuple[int, str]] = []
    lane = 0
    while lane >= 0:
        passed = ring.passed[lane]
        if passed < len(programs[lane]):
            order.append((lane, programs[lane][passed]))
            lane = ring.at_point(lane)
        else:
            order.append((lane, "end"))
            lane = ring.at_end(lane)
    return order
