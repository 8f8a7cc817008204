"""What a rank sees of its steps: traces, of every 32nd overlapped step for the statistics, of all steps for a profile;
and what it has counted of its experts' load, told now and then: every tenth of a window, and before it pauses.

The counts lie on the device, and only grow. Their copy to the host is started after a step, and read after a later one
when it has arrived, so that no step waits for it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np

from moe import ExpertPlacement
from moe.balance import Ints
from serving.logs import log_event
from serving.requests import TracedTime
from ubatch import Trace, summarise, tracing, write_chrome
from ubatch.streams import HostCopy

_logger = logging.getLogger(__name__)

TRACE_EVERY = 32
"""One of this many overlapped steps is traced."""
MOST_SPANS = 1_000_000
"""A profile stops recording at this number of spans, some 200 MB: it may have been forgotten."""


EXPERT_LOADS = "expert_loads"
"""What a profile calls the experts' load in its time: `counts` `[2, L, E]`, the tokens that this rank's router has sent
to each expert in prefill and in decode steps; and where they are, `slots` and `num_ranks` of `ExpertPlacement`."""
TEMPORARY = "ubatch-profile-"
"""How the name of a folder begins that is made for one profile."""


def profile_name() -> str:
    """A name for a profile that is written now. No earlier one has it: a write replaces no file."""
    return datetime.now().strftime("%Y%m%d-%H%M%S-%f")


def profile_file(name: str, rank: int) -> str:
    """The name of a rank's file. It never leads out of the folder, whatever `name` is."""
    return f"{Path(name).name}-rank-{rank}.json"


class LoadReporter:
    """Tells the load since it last did.

    Args:
        copy: starts a copy of the counts (`ModelRunner.copy_expert_loads`), which are 0 now.
        placement: where the experts are.
        every: steps from one report to the next.

    Attributes:
        placement: as given.
    """

    def __init__(self, copy: Callable[[], HostCopy], placement: ExpertPlacement, every: int) -> None:
        self.placement = placement
        self._copy, self._every = copy, every
        self._steps = 0
        self._copying: tuple[int, HostCopy] | None = None
        self._told: Ints = np.zeros((2, *self.experts), dtype=np.int64)

    @property
    def experts(self) -> tuple[int, int]:
        """MoE layers, and experts of each."""
        return self.placement.num_layers, self.placement.num_experts

    def stepped(self) -> None:
        """A step has ended that had tokens on some rank."""
        self._steps += 1
        if self._steps >= self._every and self._copying is None:
            self._copying = self._steps, self._copy()
            self._steps = 0

    def news(self, *, now: bool = False) -> Iterator[tuple[int, Ints]]:
        """Reports that are due, and have arrived on the host: steps that the rank has run since it told last, with
        tokens on any rank, and `[2, L, E]`: tokens routed to each expert, in prefill and in decode steps.

        Args:
            now: of all steps so far; waits for them.
        """
        if self._copying is not None and (now or self._copying[1].done()):
            (steps, copy), self._copying = self._copying, None
            yield self._since(steps, copy)
        if now and self._steps:
            steps, self._steps = self._steps, 0
            yield self._since(steps, self._copy())

    def total(self) -> Ints:
        """All counts so far; waits for the steps that run."""
        return np.asarray(self._copy().wait().numpy())

    def _since(self, steps: int, copy: HostCopy) -> tuple[int, Ints]:
        counts = np.asarray(copy.wait().numpy())
        before, self._told = self._told, counts
        return steps, counts - before


class StepTracer:
    """Decides which steps of one rank are traced, and keeps their totals.

    Args:
        measures: spans measure the work itself. On a GPU they measure only how long the host took to queue it: then
            there are profiles, but no statistics.
        loads: tells the experts' load; a profile has that of its time. None for a dense model.

    Attributes:
        total: over the steps traced for the statistics. No step is added while a profile runs.
    """

    def __init__(self, *, measures: bool = True, loads: LoadReporter | None = None) -> None:
        self.total = TracedTime()
        self._loads = loads
        self._loads_before: Ints | int = 0
        self._measures = measures
        self._untraced = 0
        self._profile: Trace | None = None
        self._full = False

    @contextmanager
    def step(self) -> Iterator[Trace | None]:
        """Context of a step's launch; gives its trace, or None. If the step overlaps, call `engaged` when it ends."""
        if self._profile is not None:
            trace = None if self._full else self._profile
        else:
            trace = Trace() if self._measures and self._untraced >= TRACE_EVERY - 1 else None
        if trace is None:
            yield None
            return
        with tracing(trace):
            yield trace
        if trace is self._profile:
            self._trim(trace)

    def engaged(self, trace: Trace | None) -> None:
        """Count an overlapped step that has ended, with the trace that `step` gave."""
        if trace is None or trace is self._profile:
            self._untraced += 1
        elif trace.spans and self._untraced >= TRACE_EVERY - 1:  # an empty trace belongs to a profile that has ended
            summary, total = summarise(tuple(trace.spans)), self.total
            total.traced_steps += 1
            total.hidden_s += summary.hidden_s
            total.exposed_s += summary.exposed_s
            total.handoff_wait_s += summary.handoff_s
            total.communication_s += summary.communication_s
            self._untraced = 0

    def start_profile(self) -> None:
        """Record every step from now on; the records of an unfinished profile are dropped."""
        if self._profile is not None:
            self._profile.clear()
        self._profile, self._full = Trace(), False
        self._loads_before = 0 if self._loads is None else self._loads.total()

    def stop_profile(self, path: Path, rank: int) -> str | None:
        """Write the profile as a Chrome trace; returns None, or the reason why it was not written."""
        trace, self._profile = self._profile, None
        if trace is None:
            return "no profile was started."
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            extra = {rank: self._loads_since()}
            write_chrome(
                path, {rank: trace.spans}, notes={rank: trace.notes}, measures=self._measures, extra=extra, new=True
            )
        except OSError as error:
            return f"cannot write {path}: {error.strerror}; the {trace.step} steps that were recorded are lost."
        else:
            log_event(_logger, "profile written", path=path, steps=trace.step, spans=len(trace.spans))
            return None
        finally:
            trace.clear()  # the overlapped loop may still have to process a step that was recorded in it

    def _loads_since(self) -> dict[str, object]:
        """The experts' load since the profile was started."""
        if self._loads is None:
            return {}
        placement, counts = self._loads.placement, self._loads.total() - self._loads_before
        return {
            EXPERT_LOADS: {
                "counts": counts.tolist(),
                "slots": placement.experts.tolist(),
                "num_ranks": placement.num_ranks,
            }
        }

    def _trim(self, trace: Trace) -> None:
        trace.events.clear()  # only the simulator needs events; a profile has spans and notes
        trace.order.clear()
        if len(trace.spans) >= MOST_SPANS:
            self._full = True
            log_event(_logger, "profile full", level=logging.WARNING, spans=len(trace.spans), steps=trace.step)
