"""Diagnose a trace in words. Every rule is a pure function from steps to findings; every finding has its numbers.

off               overlap is switched off, though steps wait for communication
losses, gains     sizes at which overlapped steps are slower, or faster, than serial ones that were measured
unmeasured        sizes at which no serial steps were measured
could_overlap     steps below a threshold that wait for communication
single            steps of one token, which cannot be split
declined          why steps did not overlap, and what to do about it; always, if no step of a mode did
outside           the time between steps

The rules about time inside overlapped steps are in `inside`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median

from serving.workbench.tracing.inside import (
    Finding,
    FindingKind,
    exposed,
    hand_offs,
    idle,
    meetings,
    nothing_to_hide,
    uneven,
)
from serving.workbench.tracing.steps import LEAST_STEPS, SizeClass, StepRecord, compare
from ubatch import DeclineReason, ForwardMode
from ubatch.schedules import mode_key

WORTH_SAYING = 0.02
"""Gains and losses below this share of a step's time are noise."""
DECLINED_SHARE = 0.1
BETWEEN_SHARE = 0.05


Rule = Callable[[Sequence[StepRecord]], Iterable[Finding]]
Verdict = Callable[[Sequence[SizeClass]], Iterable[Finding]]


def diagnose(
    steps: Sequence[StepRecord],
    *,
    serial: Sequence[StepRecord] = (),
    measures: bool = True,
    between: Sequence[tuple[float, float]] = (),
) -> list[Finding]:
    """All findings about a trace; problems first.

    Args:
        steps: the trace's steps, see `read_steps`.
        serial: steps of a run without overlap, to compare with.
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
    found = [finding for rule in (_RULES if measures else (single, declined)) for finding in rule(steps)]
    if measures:
        classes = compare(steps, serial)
        found = [finding for verdict in _VERDICTS for finding in verdict(classes)] + found
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


def losses(measured: Sequence[SizeClass]) -> Iterable[Finding]:
    """Find sizes at which overlapped steps are slower: all sizes up to one, or single ones."""
    for mode, classes in _by_mode(measured).items():
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


def _small_steps_lose(mode: str, classes: Sequence[SizeClass], *, whole: bool) -> Finding:
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


def gains(measured: Sequence[SizeClass]) -> Iterable[Finding]:
    """Find sizes at which overlapped steps are faster."""
    for mode, classes in _by_mode(measured).items():
        winning = [each for each in classes if each.change < -WORTH_SAYING]
        if winning:
            sizes = ", ".join(_sizes(each) for each in winning)
            yield Finding(
                FindingKind.GOOD,
                f"{mode} steps of {sizes} tokens gain {-_pooled(winning):.0%} ({_evidence(winning)}).",
                {"change": _pooled(winning), "steps": sum(len(each.changes) for each in winning)},
            )


def unmeasured(classes: Sequence[SizeClass]) -> Iterable[Finding]:
    """Find sizes at which nothing says whether overlapped steps are faster."""
    for mode, chosen in _modes(each for each in classes if not each.measured).items():
        steps, serial = (sum(len(getattr(each, name)) for each in chosen) for name in ("overlapped", "serial"))
        yield Finding(
            FindingKind.HINT,
            f"whether overlap gains for {mode} steps of {', '.join(map(_sizes, chosen))} tokens is not known: {steps} "
            f"overlapped and {serial} serial steps of that size were measured, and {LEAST_STEPS} of both are needed. "
            f"Run once without --enable-dbo, and give its trace.json with --serial.",
            {"steps": steps, "serial": serial},
        )


def could_overlap(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find steps below a threshold that wait for communication, if no overlapped step of their mode loses."""
    losing = {each.mode for each in compare(steps) if each.measured and each.change > WORTH_SAYING}
    for mode in sorted({step.mode for step in steps} - losing):
        chosen = [step for step in steps if step.mode == mode and step.reason in _BELOW and not step.single]
        could = _could_gain(chosen)
        if len(chosen) < LEAST_STEPS or could < DECLINED_SHARE:
            continue
        yield Finding(
            FindingKind.HINT,
            f"{len(chosen)} {mode} steps of {_tokens(chosen)} ran unsplit, below the threshold, and waited for "
            f"communication {_waiting(chosen):.0%} of their time: a lower {_threshold(mode)} could gain up to "
            f"{could:.0%}, less what splitting small steps costs. `ubatch tune` measures it.",
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


def _by_mode(classes: Iterable[SizeClass]) -> dict[str, list[SizeClass]]:
    """The measured ones by mode."""
    return _modes(each for each in classes if each.measured)


def _modes(classes: Iterable[SizeClass]) -> dict[str, list[SizeClass]]:
    """By mode; they come sorted by mode and size."""
    return {mode: list(own) for mode, own in groupby(classes, key=lambda each: each.mode)}


def _pooled(classes: Sequence[SizeClass]) -> float:
    return median(change for each in classes for change in each.changes)


def _sizes(each: SizeClass) -> str:
    return f"{each.size}-{2 * each.size - 1}" if each.size > 1 else "1"


def _evidence(classes: Sequence[SizeClass]) -> str:
    overlapped = [step for each in classes for step in each.overlapped]
    serial = [step for each in classes for step in each.serial]
    typical, reference = (median(step.call_s for step in steps) * 1e3 for steps in (overlapped, serial))
    return (
        f"median of {len(overlapped)} steps, {typical:.2f} ms, against {len(serial)} serial steps of "
        f"{_tokens(serial)}, {reference:.2f} ms"
    )


def _tokens(steps: Sequence[StepRecord]) -> str:
    few, many = min(step.tokens for step in steps), max(step.tokens for step in steps)
    return f"{few} to {many} tokens" if few < many else f"{few} token{'s' * (few != 1)}"


def _threshold(mode: str) -> str:
    """The setting of a mode's threshold; modes as in `ubatch.schedules.modes`. Verify has no flag of its own."""
    flags = {"decode": "--dbo-decode-token-threshold", "verify": "the token_threshold of verify (YAML)"}
    return flags.get(mode_key(ForwardMode(mode)), "--dbo-prefill-token-threshold")


# ----------------------------------------------------------------------------------------------- why not overlapped

_ADVICE: Mapping[str, str] = {
    DeclineReason.DISABLED: "--enable-dbo switches overlap on",
    DeclineReason.PEER_DECLINED: "another rank declined, for its own reason; all ranks must have enough tokens",
    DeclineReason.LAST_UBATCH_EMPTY: "a rank had fewer requests than lanes; spread them, or raise the threshold",
    DeclineReason.KV_ORDER: "no cut leaves a request's tokens in the order of the lanes; smaller prefill chunks help",
    DeclineReason.MODE_NOT_SPLIT: "such steps are never split",
    DeclineReason.MODES_DIFFER: "one rank decoded while another one prefilled; smaller prefill chunks help",
    DeclineReason.LANES_DIFFER: "ranks have different numbers of lanes; give all the same settings",
    DeclineReason.SCHEDULES_DIFFER: "ranks have different schedules; give all the same settings",
    DeclineReason.SERIAL_SCHEDULE: "the schedule has one lane; choose another one with --schedule",
    DeclineReason.NOT_REQUESTED: "their caller asked for one batch",
    DeclineReason.NO_GAIN_EXPECTED: "running steps show no gain; a threshold that is given overlaps them all the same",
}
_BELOW = frozenset({DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.BELOW_PREFILL_THRESHOLD})
_EXPLAINED_ELSEWHERE = _BELOW | {DeclineReason.DISABLED}
"""Explained by other rules if some step of the mode overlapped."""


def single(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Name steps of one token."""
    for mode, count in sorted(Counter(step.mode for step in steps if step.single).items()):
        yield Finding(
            FindingKind.FACT,
            f"{count} {mode} step{'s' * (count != 1)} had one token on a rank, which cannot be split: send more "
            f"requests at a time, at least as many per rank as lanes.",
            {"steps": count},
        )


def declined(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Say why steps did not overlap: of a mode that never did, every reason; else the frequent ones."""
    for mode, count in sorted(Counter(step.mode for step in steps).items()):
        own = [step for step in steps if step.mode == mode]
        never = not any(step.overlapped for step in own)
        reasons = Counter(step.reason for step in own if step.reason is not None and not step.single)
        for reason, times in reasons.most_common():
            if not never and (reason in _EXPLAINED_ELSEWHERE or times < max(LEAST_STEPS, DECLINED_SHARE * count)):
                continue
            advice = _ADVICE.get(reason, "see `DeclineReason`")
            if reason in _BELOW:
                tokens = _tokens([step for step in own if step.reason == reason and not step.single])
                advice = f"they had {tokens}; send more requests at a time, or lower {_threshold(mode)}"
            first = f"no {mode} step overlapped: {times} of {count}" if never else f"{times} of {count} {mode} steps"
            yield Finding(
                FindingKind.HINT,
                f"{first} ({times / count:.0%}) ran unsplit because of {reason}: {advice}.",
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


_VERDICTS: tuple[Verdict, ...] = (losses, gains, unmeasured)
_RULES: tuple[Rule, ...] = (off, could_overlap, single, declined)
_RULES += (nothing_to_hide, exposed, meetings, hand_offs, idle, uneven)
