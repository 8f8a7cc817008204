"""The decisions of `--enable-dbo`: whether the next step overlaps, by its kind and size. No clock, ranks or torch.

The policy gets what all ranks know of a step (kind, tokens, whether it overlapped) and, some steps later, its stages.
Every rank passes the same values, so all ranks decide the same.

    a size that never ran            first as the nearest one, then serial until its time is known
    overlap is believed faster       the size overlaps; now and then a serial step checks that it still should
    overlap might be faster          now and then a step tries it; less often, the more have told that it is not
    the times of a size change       so has the machine or the link: the sizes are forgotten, and begin anew

Believed: the simulator's answer for the stages of serial steps, corrected by the steps that overlapped
(`model_runner.auto.size_times`, which also says when to try). Where even an optimist expects nothing, nothing is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model_runner.auto.size_times import SizeTimes
from model_runner.auto.step_stages import Stages
from ubatch.schedules.schedule import Schedule

__all__ = ["Policy", "Seen"]

_NEW_STEPS, _SETTLED_EVERY, _LONG_LOG_S = 8, 4, math.log(0.075)
"""The first 8 steps of a size are timed, and the 8 after a change (its steps take another time, or the decision is
reversed); later every fourth, unless steps are long. Timing a step takes some 0.15 ms, of a long one at most 0.2%."""
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_MEMORY = 0.06, 0.02, 0.15, 32
"""Standard deviation of the log of a step's time: at first, its limits, and the steps that it is averaged over."""
_SLOPE, _LEAST_SPREAD = 0.35, 0.1
"""d log seconds / d log tokens of serial steps, until the sizes that are known are spread so much (squares of logs)."""


@dataclass(frozen=True)
class Seen:
    """A step that was voted on, and whose time is wanted.

    Attributes:
        kind: `decode`, `prefill` or `verify`.
        size: the size that it counts for, a power of two.
        tokens: mean tokens of the ranks that have some.
        overlapped: whether it ran under its kind's schedule.
        trial: whether it ran the other way than decided for its size because the policy wanted to know.
    """

    kind: str
    size: int
    tokens: int
    overlapped: bool
    trial: bool


class Policy:
    """Decides for kinds of steps, given the schedule of each one's overlapped steps.

    Attributes:
        timed: number of steps whose times were told.
        trials: number of steps that ran the other way than decided for their size, to know.
    """

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self.timed = self.trials = 0
        self._schedules = dict(schedules)
        self._sizes: dict[str, dict[int, SizeTimes]] = {kind: {} for kind in schedules}
        self._noise = dict.fromkeys(schedules, _NOISE)
        self._slopes = dict.fromkeys(schedules, _SLOPE)
        self._latest: dict[str, int] = {}  # kind -> mean tokens of the latest step
        self._own: dict[str, int] = {}  # kind -> this rank's tokens in its latest vote
        self._warm: set[tuple[str, bool]] = set()  # kind, overlapped: of which a step's time was told
        self._reasons: Mapping[str, str] | None = None  # as of the latest times; every step asks

    def overlaps(self, kind: str, tokens: int) -> bool:
        """Whether a step of this kind with `tokens` tokens on this rank should overlap. Ranks with other batches
        must decide alike: if this rank has a batch like its last, the size of the kind's latest step counts."""
        before, self._own[kind] = self._own.get(kind, 0), tokens
        return self._wants(kind, self._latest.get(kind, tokens) if before / 2 <= tokens <= before * 2 else tokens)

    def _wants(self, kind: str, tokens: int) -> bool:
        """The same, by the known size that is nearest, for all ranks."""
        sizes, size = self._sizes[kind], self._size(kind, tokens)
        nearest = min(sizes, key=lambda other: abs(other.bit_length() - size.bit_length()), default=None)
        own = SizeTimes() if nearest is None else sizes[nearest]
        return own.seconds.weight > 0 and own.overlaps != own.is_due(self._believed(kind, own))

    def saw(self, kind: str, tokens: int, overlapped: bool) -> Seen | None:
        """Records a step after its vote: its kind, or another word if nothing is decided for it; the mean tokens of the
        ranks that have some; whether it runs under its kind's schedule. Returns what `learn` needs with its stages;
        None if its time is not wanted."""
        if kind not in self._sizes:
            return None
        wanted, size = self._wants(kind, tokens), self._size(kind, tokens)
        own = self._sizes[kind].setdefault(size, SizeTimes())
        trial = own.seconds.weight > 0 and overlapped == wanted != own.overlaps
        self.trials += trial
        self._latest[kind] = tokens
        own.steps += 1
        if trial:
            own.tried_at, own.sure = own.steps, own.sure + overlapped
        is_long = own.seconds.weight > 0 and own.seconds.value > _LONG_LOG_S
        timed = trial or is_long or own.steps - own.new_at <= _NEW_STEPS or own.steps % _SETTLED_EVERY == 0
        return Seen(kind, size, tokens, overlapped, trial) if timed else None

    def learn(self, step: Seen, stages: Stages) -> bool:
        """Learns the stages of a step that `saw` returned, then decides for its size; returns whether that has changed.
        The calls are the same on every rank."""
        self._reasons = None
        self.timed += 1
        own = self._sizes[step.kind].setdefault(step.size, SizeTimes())
        before = own.overlaps
        if (step.kind, step.overlapped) not in self._warm:  # the very first one connects to peers, or starts threads
            self._warm.add((step.kind, step.overlapped))
            own.sure = 0
            return False
        if self._add(step, own, stages):  # nothing that was told holds on another machine or over another link
            self._sizes = {kind: {} for kind in self._sizes}
            own = self._sizes[step.kind][step.size] = SizeTimes()
            self._add(step, own, stages)
        if own.seconds.weight:
            own.overlaps = self._believed(step.kind, own) < 0
        if own.overlaps != before:
            own.watch()
        return own.overlaps != before

    def _add(self, step: Seen, own: SizeTimes, stages: Stages) -> bool:
        """Returns whether the times of its size have changed."""
        kind, log_tokens = step.kind, math.log(max(1, step.tokens))
        if not own.seconds.weight:
            if step.overlapped:
                return False  # nothing to compare with
            own.tokens = log_tokens
        log_s = math.log(stages.seconds) - self._slope(kind) * (log_tokens - own.tokens)
        level, value = own.seconds, log_s
        if step.overlapped:
            level, value = own.off, log_s - own.seconds.value - own.expected
        moved, noise = abs(value - level.value) if level.weight else 0.0, self._noise[kind]
        predicted = own.seconds.value + own.expected
        changed = level.add(value, noise, trial=step.trial)
        if moved:
            variance = noise**2 + (min(moved, 3 * noise) ** 2 - noise**2) / _NOISE_MEMORY
            self._noise[kind] = min(max(math.sqrt(variance), _LEAST_NOISE), _MOST_NOISE)
        if level.far:
            own.watch()
        elif not step.overlapped:
            own.add_stages(stages, self._schedules[kind])
        if step.trial and not step.overlapped:  # how long its overlapped steps take stays known
            own.off.value -= own.seconds.value + own.expected - predicted
        return changed

    def _size(self, kind: str, tokens: int) -> int:
        """The size that a step counts for, the nearest power of two: that of the kind's latest step, if it has half to
        twice its tokens."""
        latest = self._latest.get(kind, tokens)
        return 1 << round(math.log2(latest if latest / 2 <= tokens <= latest * 2 else max(1, tokens)))

    def _believed(self, kind: str, own: SizeTimes) -> float:
        told = [each.off for each in self._sizes[kind].values() if each is not own and each.off.weight]
        weight = sum(each.weight for each in told)
        elsewhere = sum(each.weight * each.value for each in told) / (weight + 1) if told else None
        return own.believed(elsewhere, self._noise[kind])

    def _slope(self, kind: str) -> float:
        """d log seconds / d log tokens of serial steps, from the sizes that are known."""
        known = [each for each in self._sizes[kind].values() if each.seconds.weight]
        mean = sum(each.tokens for each in known) / max(1, len(known))
        spread = sum((each.tokens - mean) ** 2 for each in known)
        if spread > _LEAST_SPREAD:
            found = sum((each.tokens - mean) * each.seconds.value for each in known) / spread
            self._slopes[kind] = min(max(found, 0.0), 1.2)
        return self._slopes[kind]

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> a sentence: what each size does, and why."""
        if self._reasons is None:
            self._reasons = {kind: self._in_words(kind) for kind in self._schedules}
        return self._reasons

    def _in_words(self, kind: str) -> str:
        told = []
        for size, own in sorted((size, own) for size, own in self._sizes[kind].items() if own.seconds.weight):
            waits = "" if own.stages is None else f", {own.stages.waits / own.stages.seconds:.0%} waiting"
            gain = f"{math.exp(-self._believed(kind, own)):.2f}x" + ("" if own.off.weight else " expected")
            does, serial_ms = "overlapped" if own.overlaps else "serial", math.exp(own.seconds.value) * 1e3
            told.append(f"{size}: {does} ({serial_ms:.3g} ms serial{waits}; overlapped {gain})")
        return "by tokens: " + "; ".join(told) if told else "serial: nothing is measured yet"
