"""The decisions of `--enable-dbo`: whether the next step overlaps, by its kind and size. No clock, ranks or torch.

The policy gets what all ranks know of a step (kind, tokens, whether it overlapped) and, some steps later, its stages.
Every rank passes the same values, so all ranks decide the same.

    a size that never ran          serial until its stages are known
    overlap may be faster          the next step tries it, within the budget; what it told fades
    overlap is believed faster     the size overlaps
    it has overlapped for long     one serial step, within the budget; sooner if its time or its transfers' have changed
    the waits of a size changed    so has the link: every other size runs serially once more, within the budget

Believed: the simulator's answer for the stages of serial steps, corrected by the steps that overlapped
(`model_runner.auto.size_times`). A size from which even the optimist expects nothing is never tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model_runner.auto.size_times import Belief, SizeTimes
from model_runner.auto.step_stages import Stages
from ubatch.schedules.schedule import Schedule

__all__ = ["Policy", "Seen"]

_HYSTERESIS = 0.01
"""A decision changes if the other way is believed faster by more than this (log)."""
_ALLOWANCE_STEPS, _TRIAL_SHARE = 3.0, 0.01
"""Mean steps that trials may lose at the start, and the share of the time that adds to it."""
_TRIAL_EVERY = 6
"""Steps of a size between two trials, or two checks: by then the first one's time is known, on a GPU, too."""
_FIRST_CHECK, _CHECK_EVERY = 8, 50
"""Steps of a size that has begun to overlap until a serial step checks it; later twice as many, up to the second."""
_NEW_STEPS, _SETTLED_EVERY, _LONG_LOG_S = 8, 4, math.log(0.075)
"""Every step's time is wanted for so many steps after something new, later that of every fourth if steps are not long:
timing a step and learning from it takes some 0.15 ms, of a long one at most 0.2%."""
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_MEMORY = 0.06, 0.02, 0.15, 32
_WARM_UP = 0.1
"""The very first overlapped step says nothing if it took longer than expected by this much (log)."""
_SLOPE, _LEAST_SPREAD = 0.35, 0.1
"""d log seconds / d log tokens of serial steps, until the sizes that are known are spread so much (squares of logs)."""


@dataclass(frozen=True)
class Seen:
    """A step that was voted on, and whose time is wanted.

    Attributes:
        kind: `decode`, `prefill` or `verify`.
        tokens: mean tokens of the ranks that have some.
        overlapped: whether it ran under its kind's schedule.
        own: what is known of its size.
        trial: whether it ran the other way than decided for its size because the policy wanted to know.
    """

    kind: str
    tokens: int
    overlapped: bool
    own: SizeTimes
    trial: bool


class Policy:
    """Decides for the kinds of steps it is given.

    Args:
        schedules: kind -> the schedule of its overlapped steps.

    Attributes:
        steps: number of steps voted on, of kinds that are decided.
        timed, seconds: number of steps whose times are known, and the total of these times.
        trials: number of steps that ran the other way than decided for their size, to know.
        lost_s: estimated seconds that these, and the first overlapped step of every size, were slower.
        changes: number of times the decision changed, at any size.
    """

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self.steps = self.timed = self.trials = self.changes = 0
        self.seconds = self.lost_s = 0.0
        self._schedules = dict(schedules)
        self._sizes: dict[str, dict[int, SizeTimes]] = {kind: {} for kind in schedules}
        self._noise = dict.fromkeys(schedules, _NOISE)
        self._slopes = dict.fromkeys(schedules, _SLOPE)
        self._latest: dict[str, int] = {}  # kind -> tokens of the latest step
        self._warm: set[str] = set()  # kinds that have overlapped once
        self._new_until = _NEW_STEPS
        self._reasons: Mapping[str, str] | None = None  # as of the latest times; every step asks

    def overlaps(self, kind: str, tokens: int) -> bool:
        """Whether a step of this kind with `tokens` tokens on this rank should overlap.

        Ranks with somewhat different batches must decide alike: while the batch is like that of the latest step of the
        kind, the latest's size counts, else the known size that is nearest.
        """
        sizes, size = self._sizes[kind], self._size(kind, tokens)
        nearest = min(sizes, key=lambda other: abs(other.bit_length() - size.bit_length()), default=size)
        own = sizes.get(size, sizes.get(nearest))
        if own is None or not self._can_compare(kind, own):
            return False
        serial_s, belief = math.exp(own.seconds.value), self._belief(kind, own, faded=True)
        if own.overlaps:
            since = own.steps - own.serial_at
            doubtful = (own.suspect or own.stale or own.seconds.far) and since >= _TRIAL_EVERY
            due = doubtful or since >= min(_CHECK_EVERY, _FIRST_CHECK << min(own.checks, _CHECK_EVERY))
            return not (due and self._affords(-serial_s * math.expm1(belief.mean)))
        if own.steps - own.overlapped_at < _TRIAL_EVERY and own.overlapped_at:
            return False
        return belief.hoped < -_HYSTERESIS and self._affords(serial_s * math.expm1(belief.mean))

    def saw(self, kind: str, tokens: int, overlapped: bool) -> Seen | None:
        """Records a step after its vote.

        Args:
            kind: its kind, or another word for steps without a decision.
            tokens: mean tokens of the ranks that have some.
            overlapped: whether it runs under its kind's schedule.

        Returns:
            What `learn` needs with its stages; None if its time is not wanted.
        """
        if kind not in self._sizes:
            return None
        wanted = self.overlaps(kind, tokens)  # by a rank whose batch is the mean one
        own = self._sizes[kind].setdefault(self._size(kind, tokens), SizeTimes())
        trial = overlapped == wanted != own.overlaps
        self.steps += 1
        self.trials += trial
        self._latest[kind] = tokens
        if overlapped != own.latest:
            self._new_until = self.steps + _NEW_STEPS
        own.latest = overlapped
        own.steps += 1
        if overlapped:
            own.overlapped_at = own.steps
        else:
            own.serial_at = own.steps
            own.checks += own.overlaps
        is_long = own.known and own.seconds.value > _LONG_LOG_S
        timed = is_long or self.steps <= self._new_until or own.steps % _SETTLED_EVERY == 0
        return Seen(kind, tokens, overlapped, own, trial) if timed else None

    def learn(self, step: Seen, stages: Stages) -> bool:
        """Learns the stages of a step that `saw` returned, then decides for its size; returns whether that has changed.
        The calls are the same on every rank."""
        own, kind = step.own, step.kind
        self._reasons = None
        self.timed += 1
        self.seconds += stages.seconds
        if not own.known and step.overlapped:
            return False  # nothing to compare with
        noise, before = self._noise[kind], own.overlaps
        moved = abs((self._learn_overlapped if step.overlapped else self._learn_serial)(step, stages))
        if moved:
            variance = noise**2 + (min(moved, 3 * noise) ** 2 - noise**2) / _NOISE_MEMORY
            self._noise[kind] = min(max(math.sqrt(variance), _LEAST_NOISE), _MOST_NOISE)
        if self._can_compare(kind, own):
            own.overlaps = self._belief(kind, own).mean < (_HYSTERESIS if before else -_HYSTERESIS)
        if own.overlaps != before:
            own.checks = 0
            self.changes += 1
        return own.overlaps != before

    def _learn_serial(self, step: Seen, stages: Stages) -> float:
        """Returns by how much its log time differed from what was believed; so does the next."""
        own, kind, log_tokens = step.own, step.kind, math.log(max(1, step.tokens))
        slope = self._slope(kind)
        if step.trial:
            overlapped = own.serial_log_s(log_tokens, slope) + self._belief(kind, own).mean
            self._lose(stages.seconds, math.exp(overlapped))
        was_stale = own.stale
        moved, other_link = own.add_serial(log_tokens, stages, self._noise[kind], slope, self._schedules[kind])
        if other_link and not was_stale:  # else it is no news to the others
            for each in (each for sizes in self._sizes.values() for each in sizes.values()):
                each.stale = each is not own
        if own.seconds.far or other_link:  # is it a new level? The next steps tell
            self._new_until = self.steps + _NEW_STEPS
        return moved

    def _learn_overlapped(self, step: Seen, stages: Stages) -> float:
        own, kind, log_tokens = step.own, step.kind, math.log(max(1, step.tokens))
        serial = own.serial_log_s(log_tokens, self._slope(kind))
        ratio = math.log(stages.seconds) - serial
        if step.trial or not own.off.weight:
            self._lose(stages.seconds, math.exp(serial))
        warms_up = kind not in self._warm and own.off_of(ratio) > _WARM_UP
        self._warm.add(kind)
        if warms_up or own.stale:  # nothing to compare with
            return 0.0
        travel = math.log(stages.travel) - 0.5 * log_tokens if stages.travel > 0 else None
        return own.add_overlapped(ratio, travel, self._noise[kind])

    def _lose(self, seconds: float, other_s: float) -> None:
        """Count what a step took longer than the other way; of a stall, not more than such a step."""
        self.lost_s += min(max(0.0, seconds - other_s), other_s)

    # -- what is believed --------------------------------------------------------------------------------------

    def _size(self, kind: str, tokens: int) -> int:
        """The size that a step counts for, a power of two: that of the kind's latest step, if it has half to twice its
        tokens."""
        latest = self._latest.get(kind, tokens)
        return 1 << max(0, (latest if latest / 2 <= tokens <= latest * 2 else tokens).bit_length() - 1)

    def _belief(self, kind: str, own: SizeTimes, *, faded: bool = False) -> Belief:
        others = (each for each in self._sizes[kind].values() if each is not own and not each.stale)
        told = [(each.off.weight, each.off.value) for each in others]
        weight = sum(weight for weight, _ in told)
        elsewhere = sum(weight * value for weight, value in told) / (weight + 1) if weight else None
        return own.belief(elsewhere, self._noise[kind], faded=faded)

    def _can_compare(self, kind: str, own: SizeTimes) -> bool:
        """Whether a serial time of this size is known; the very first one of a kind may have warmed up."""
        return own.seconds.weight >= 2 or (own.known and sum(each.known for each in self._sizes[kind].values()) > 1)

    def _slope(self, kind: str) -> float:
        """d log seconds / d log tokens of serial steps, from the sizes that are known and not stale."""
        known = [each for each in self._sizes[kind].values() if each.known and not each.stale]
        mean = sum(each.tokens for each in known) / max(1, len(known))
        spread = sum((each.tokens - mean) ** 2 for each in known)
        if spread > _LEAST_SPREAD:
            found = sum((each.tokens - mean) * each.seconds.value for each in known) / spread
            self._slopes[kind] = min(max(found, 0.0), 1.2)
        return self._slopes[kind]

    def _affords(self, cost_s: float) -> bool:
        mean_s = self.seconds / self.timed if self.timed else 0.0
        return cost_s <= (_TRIAL_SHARE * self.steps + _ALLOWANCE_STEPS) * mean_s - self.lost_s

    # -- for whoever asks ----------------------------------------------------------------------------------------------

    @property
    def overlapping(self) -> Mapping[str, Mapping[int, bool]]:
        """Kind -> smallest tokens of a size -> whether it overlaps."""
        return {kind: {size: own.overlaps for size, own in sorted(of.items())} for kind, of in self._sizes.items()}

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> a sentence: what each size does, and why."""
        if self._reasons is None:
            self._reasons = {kind: self._in_words(kind) for kind in self._schedules}
        return self._reasons

    def _in_words(self, kind: str) -> str:
        told = []
        for size, own in sorted(self._sizes[kind].items()):
            if not own.known:
                continue
            waits = "" if own.stages is None else f", {own.stages.waits / own.stages.seconds:.0%} waiting"
            gain = f"{math.exp(-self._belief(kind, own).mean):.2f}x" + ("" if own.off.weight else " expected")
            does, serial_ms = "overlapped" if own.overlaps else "serial", math.exp(own.seconds.value) * 1e3
            told.append(f"{size}: {does} ({serial_ms:.3g} ms serial{waits}; overlapped {gain})")
        return "by tokens: " + "; ".join(told) if told else "serial: nothing is measured yet"
