"""Diagnose a trace in words. Every rule is a pure function from steps to findings; every finding has its numbers.

off               overlap is switched off, though steps wait for communication
losses, gains     sizes at which overlapped steps are slower, or faster, than others (`steps.compare`)
could_overlap     steps below a threshold that wait for communication
declined          other reasons that keep steps from overlapping, and what to do about them
outside           the time between steps

The rules about time inside overlapped steps are in `inside`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median

from serving.workbench.tracing.finding import Finding, FindingKind
from serving.workbench.tracing.inside import exposed, hand_offs, idle, meetings, nothing_to_hide, uneven
from serving.workbench.tracing.steps import LEAST_STEPS, Basis, Comparison, StepRecord, compare
from ubatch import DeclineReason, ForwardMode
from ubatch.schedules.modes import mode_key

__all__ = ["diagnose"]

WORTH_SAYING = 0.02
"""Gains and losses below this share of a step's time are noise."""
DECLINED_SHARE = 0.1
BETWEEN_SHARE = 0.05


Rule = Callable[[Sequence[StepRecord]], Iterable[Finding]]


def diagnose(
    steps: Sequence[StepRecord], *, measures: bool = True, between: Sequence[tuple[float, float]] = ()
) -> list[Finding]:
    """All findings about a trace; problems first.

    Args:
        steps: the trace's steps, see `read_steps`.
        measures: whether spans measure how long work took. On an asynchronous device they do not; then only the reasons
            that keep steps from overlapping are reported.
        between: the result of `between_steps` for every rank.
    """
    if not steps:
        return [Finding(FindingKind.PROBLEM, "no step was recorded: send requests while it records.")]
    first = [_census(steps)]
    if not measures:
        text = (
            "the device runs asynchronously, so the spans show how long the host took to queue work and not how long "
            "the work took: they cannot show what overlap gained."
        )
        first.append(Finding(FindingKind.FACT, text))
    found = [finding for rule in (_RULES if measures else (declined,)) for finding in rule(steps)]
    found += outside(between)
    order = list(FindingKind)
    return first + sorted(found, key=lambda finding: order.index(finding.kind))


def _census(steps: Sequence[StepRecord]) -> Finding:
    modes = Counter(step.mode for step in steps)
    engaged = Counter(step.mode for step in steps if step.overlapped)
    words = ", ".join(f"{engaged[mode]} of {count} {mode}" for mode, count in sorted(modes.items()))
    figures = {"steps": len(steps), "overlapped": engaged.total()}
    return Finding(FindingKind.FACT, f"{engaged.total()} of {len(steps)} steps overlapped ({words}).", figures)


# ------------------------------------------------------------------------------------------- sizes and thresholds


def off(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find steps that wait for communication while overlap is switched off."""
    chosen = [step for step in steps if step.reason == DeclineReason.DISABLED]
    could = _could_gain(chosen)
    if len(chosen) >= LEAST_STEPS and could > WORTH_SAYING:
        yield Finding(
            FindingKind.HINT,
            f"overlap is off, and {len(chosen)} steps waited for communication {_waiting(chosen):.0%} of their time: "
            f"--enable-dbo could gain up to {could:.0%}.",
            {"steps": len(chosen), "waiting": _waiting(chosen), "could_gain": could},
        )


def losses(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find sizes at which overlapped steps are slower: all sizes up to one, or single ones."""
    for mode, classes in _by_mode(compare(steps)).items():
        losing = [each for each in classes if each.change > WORTH_SAYING]
        small = [each for each, bad in zip(classes, losing, strict=False) if each is bad]
        if small:
            yield _small_steps_lose(mode, small, whole=len(small) == len(classes))
        for each in losing[len(small) :]:
            yield Finding(
                FindingKind.PROBLEM,
                f"{mode} steps of {_sizes(each)} tokens lose {each.change:.0%} ({_evidence([each])}), while smaller "
                f"ones do not: `ubatch tune` finds a schedule for them.",
                {"size": each.size, "change": each.change},
            )


def _small_steps_lose(mode: str, classes: Sequence[Comparison], *, whole: bool) -> Finding:
    change, above = _pooled(classes), 2 * classes[-1].size
    if whole:
        advice = f"raise {_threshold(mode)} above {above - 1}, or leave overlap off for them"
        text = f"{mode} steps lose {change:.0%} at every size seen, up to {above - 1} tokens"
    else:
        advice = f"raise {_threshold(mode)} to {above}"
        text = f"{mode} steps below {above} tokens lose {change:.0%}"
    return Finding(
        FindingKind.PROBLEM,
        f"{text} ({_evidence(classes)}): {advice}.",
        {"threshold": above, "change": change, "steps": sum(len(each.changes) for each in classes)},
    )


def gains(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find sizes at which overlapped steps are faster."""
    for mode, classes in _by_mode(compare(steps)).items():
        winning = [each for each in classes if each.change < -WORTH_SAYING]
        if winning:
            sizes = ", ".join(_sizes(each) for each in winning)
            yield Finding(
                FindingKind.GOOD,
                f"{mode} steps of {sizes} tokens gain {-_pooled(winning):.0%} ({_evidence(winning)}).",
                {"change": _pooled(winning), "steps": sum(len(each.changes) for each in winning)},
            )


def could_overlap(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find steps below a threshold that wait for communication, if no overlapped step of their mode loses."""
    below = (DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.BELOW_PREFILL_THRESHOLD)
    losing = {each.mode for each in compare(steps) if each.change > WORTH_SAYING}
    for mode in sorted({step.mode for step in steps} - losing):
        chosen = [step for step in steps if step.mode == mode and step.reason in below and step.tokens > 1]
        could = _could_gain(chosen)
        if len(chosen) < LEAST_STEPS or could < DECLINED_SHARE:
            continue
        few, many = min(step.tokens for step in chosen), max(step.tokens for step in chosen)
        sizes = f"{few} to {many} tokens" if few < many else f"{few} token{'s' * (few != 1)}"
        yield Finding(
            FindingKind.HINT,
            f"{len(chosen)} {mode} steps of {sizes} ran unsplit, below the threshold, and waited for communication "
            f"{_waiting(chosen):.0%} of their time: a lower {_threshold(mode)} could gain up to {could:.0%}, less what "
            f"splitting small steps costs. `ubatch tune` measures it.",
            {"steps": len(chosen), "waiting": _waiting(chosen), "could_gain": could},
        )


def _could_gain(steps: Sequence[StepRecord]) -> float:
    """Share of the steps' time that overlap saves if splitting is free: link waits, up to a step's compute time."""
    whole = sum(step.call_s for step in steps)
    saved = sum(min(step.link_wait_s, step.summary.compute_s) for step in steps)
    return saved / whole if whole else 0.0


def _waiting(steps: Sequence[StepRecord]) -> float:
    whole = sum(step.call_s for step in steps)
    return sum(step.link_wait_s for step in steps) / whole if whole else 0.0


def _by_mode(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """By mode; they come sorted by mode and size."""
    return {mode: list(own) for mode, own in groupby(comparisons, key=lambda each: each.mode)}


def _pooled(classes: Sequence[Comparison]) -> float:
    return median(change for each in classes for change in each.changes)


def _sizes(each: Comparison) -> str:
    return f"{each.size}-{2 * each.size - 1}" if each.size > 1 else "1"


def _evidence(classes: Sequence[Comparison]) -> str:
    count = sum(len(each.changes) for each in classes)
    typical = median(each.step_s for each in classes)
    bases = sorted({each.basis for each in classes}, key=list(Basis).index)
    return f"median of {count} steps, {typical * 1e3:.2f} ms, against {' and '.join(bases)}"


def _threshold(mode: str) -> str:
    """The setting of a mode's threshold; modes as in `ubatch.schedules.modes`. Verify steps have no flag."""
    flags = {"decode": "--dbo-decode-token-threshold", "verify": "the token_threshold of verify (YAML)"}
    return flags.get(mode_key(ForwardMode(mode)), "--dbo-prefill-token-threshold")


# ----------------------------------------------------------------------------------------------- why not overlapped

_ADVICE: Mapping[str, str] = {
    DeclineReason.PEER_DECLINED: "another rank declined, for its own reason; all ranks must have enough tokens",
    DeclineReason.LAST_UBATCH_EMPTY: "a rank had fewer requests than lanes; spread them, or raise the threshold",
    DeclineReason.KV_ORDER: "no cut leaves a request's tokens in the order of the lanes; smaller prefill chunks help",
    DeclineReason.MODE_NOT_SPLIT: "such steps are never split",
    DeclineReason.MODES_DIFFER: "one rank decoded while another one prefilled; smaller prefill chunks help",
    DeclineReason.LANES_DIFFER: "ranks have different numbers of lanes; give all the same settings",
    DeclineReason.SCHEDULES_DIFFER: "ranks have different schedules; give all the same settings",
    DeclineReason.SERIAL_SCHEDULE: "the schedule has one lane; choose another one with --schedule",
    DeclineReason.NOT_REQUESTED: "their caller asked for one batch",
}
_EXPLAINED_ELSEWHERE = frozenset(
    {DeclineReason.DISABLED, DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.BELOW_PREFILL_THRESHOLD}
)


def declined(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find frequent reasons against overlap, other than thresholds."""
    for mode, count in sorted(Counter(step.mode for step in steps).items()):
        reasons = Counter(step.reason for step in steps if step.mode == mode and step.reason is not None)
        for reason, times in reasons.most_common():
            if reason in _EXPLAINED_ELSEWHERE or times < max(LEAST_STEPS, DECLINED_SHARE * count):
                continue
            advice = _ADVICE.get(reason, "see `DeclineReason`")
            yield Finding(
                FindingKind.HINT,
                f"{times} of {count} {mode} steps ({times / count:.0%}) ran unsplit because of {reason}: {advice}.",
                {"steps": times, "share": times / count},
            )


def outside(between: Sequence[tuple[float, float]]) -> Iterable[Finding]:
    """Report the time between steps, on the rank that has the least."""
    shares = [rest / whole for whole, rest in between if whole > 0]
    if shares and min(shares) >= BETWEEN_SHARE:
        yield Finding(
            FindingKind.FACT,
            f"{min(shares):.0%} of the recording passed between steps (scheduling, sampling, no requests): overlap "
            f"does not change that.",
            {"share": min(shares)},
        )


_RULES: tuple[Rule, ...] = (off, losses, gains, could_overlap, declined)
_RULES += (nothing_to_hide, exposed, meetings, hand_offs, idle, uneven)
