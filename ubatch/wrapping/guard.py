"""The guard around a call in lanes: whether it changed what its proof did not show, and the way back.

    before the lanes start        read random states and version counters; attributes are known from the last walk
    at a hand-over                what the module's code may leave on itself for later must be as it was
    before the outputs are merged compare; on a finding nothing is merged
    on a finding, an error, or outputs unlike those of the proof
        put back everything of which there is a copy; the caller then runs the call unsplit
        something has no copy: name it, and run nothing again

Reading costs some microseconds; `ubatch bench wrapper` measures it.
"""

from collections.abc import Callable

from ubatch.calls.call_plan import CannotSplit
from ubatch.schedules.vote import DeclineReason
from ubatch.wrapping.effects.random_state import RandomState, others_are_busy
from ubatch.wrapping.effects.state import State

HAND_OVER = "Hand over in an argument what it keeps between calls."


class Finding(CannotSplit):
    """A call in lanes changed what its proof did not show."""


class Guard:
    """Guards one call.

    Args:
        module, call: snapshots of the module and of the call's arguments.
        learned: paths of the arguments that the proof saw written to.
        neighbours: how many calls have begun in other threads since the wrapper was made, while a call ran here.
    """

    def __init__(self, module: State, call: State, learned: frozenset[str], neighbours: Callable[[], int]) -> None:
        self._random = RandomState()
        self._random_after: RandomState | None = None
        self._module, self._call, self._learned = module, call, learned
        self._neighbours, self._begun = neighbours, neighbours()
        self._left: str | None = None

    @property
    def at_handover(self) -> Callable[[], None] | None:
        """What lanes have to run before they hand over or end, or None."""
        return self._look if self._module.has_scratch or self._call.has_scratch else None

    def _look(self) -> None:
        for state in (self._module, self._call):
            if self._left is None and state.scratch_moved():
                self._left = next(iter(state.changed_items()), None)

    def check(self) -> None:
        """Compare.

        Raises:
            Finding: something has changed.
        """
        changed = self._module.changes() or ([] if self._left is None else [self._left])
        if changed:
            why = f"the module changed {changed[0]!r}, unlike in the call that was proved. "
            raise Finding(DeclineReason.MODULE_KEEPS_STATE, why + HAND_OVER)
        written = [path for path in self._call.changes() if path not in self._learned]
        if written:
            why = f"the call changed argument {written[0]!r}, unlike the call that was proved."
            raise Finding(DeclineReason.ARGUMENTS_CHANGED, why)
        if self._random.moved():
            raise Finding(DeclineReason.DRAWS_RANDOM, "the call drew random numbers, unlike the call that was proved.")

    def put_back(self) -> list[str]:
        """Put back what the lanes have changed. Returns what cannot be: it has no copy, or another thread was in a call
        and may have changed it."""
        if self._neighbours() != self._begun:
            return [*self._module.changes(), *self._call.changes()]
        if self._random.moved() and not others_are_busy():
            self._random_after = RandomState()
            self._random.restore()
        return [*self._module.restore(), *self._call.restore()]

    def give_back(self) -> None:
        """After the call has run unsplit: if it drew nothing, the random numbers were another thread's, which gets its
        state back."""
        if self._random_after is not None and not self._random.moved():
            self._random_after.restore()
