"""Findings, the results of rules; and the rules that diagnose where the time inside overlapped steps goes.

nothing_to_hide   steps send nothing
exposed           steps wait for the link: because it is too slow, or because of the schedule
meetings          steps wait for other ranks
hand_offs         hand-offs between lanes take long
idle              no lane computes, waits or hands over
uneven            a lane or rank computes longer than the others
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from serving.workbench.tracing.steps import LEAST_STEPS, StepRecord

EXPOSED_SHARE = 0.15
HAND_OFF_SHARE = 0.03
IDLE_SHARE = 0.1
UNEVEN = 1.25


class FindingKind(StrEnum):
    PROBLEM = "problem"
    """overlap costs time"""
    HINT = "hint"
    """overlap could gain more"""
    GOOD = "good"
    FACT = "fact"


@dataclass(frozen=True)
class Finding:
    """One finding of the diagnosis: a sentence, and its numbers by name; shares are fractions, times are seconds."""

    kind: FindingKind
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


def nothing_to_hide(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    chosen = _overlapped(steps)
    if chosen and not any(step.summary.communication_s for step in chosen):
        yield Finding(
            FindingKind.PROBLEM,
            f"{len(chosen)} steps overlapped, but nothing travelled in them: there is nothing to hide, and splitting "
            f"only costs. Leave overlap off, or share the experts among ranks.",
            {"steps": len(chosen)},
        )


def exposed(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find overlapped steps that still wait for the link."""
    chosen = _overlapped(steps)
    waiting, wall = sum(step.link_wait_s for step in chosen), _sum(chosen, "wall_s")
    if not wall or waiting < EXPOSED_SHARE * wall:
        return
    compute, link = _sum(chosen, "compute_s"), _sum(chosen, "communication_s")
    name, longest = _longest_wait(chosen, on_link=True)
    where = f"overlapped steps wait for the link {waiting / wall:.0%} of their time, {longest / waiting:.0%} of it"
    each = f"{link / len(chosen) * 1e3:.2f} ms of communication against {compute / len(chosen) * 1e3:.2f} ms of compute"
    figures = {"exposed": waiting / wall, "compute_s": compute / len(chosen), "communication_s": link / len(chosen)}
    if link > compute:
        most = compute / link
        yield Finding(
            FindingKind.FACT,
            f"{where} for {name}: the link is the limit, with {each} in a step. No schedule hides more than {most:.0%} "
            f"of it; now it is {_sum(chosen, 'hidden_s') / link:.0%}.",
            figures | {"hideable": most},
        )
    else:
        yield Finding(
            FindingKind.HINT,
            f"{where} for {name}, though {each} in a step could all be hidden: another schedule, more lanes or chunks "
            f"may do it. `ubatch tune` measures them.",
            figures,
        )


def meetings(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find overlapped steps that wait for other ranks."""
    chosen = _overlapped(steps)
    waiting, wall = sum(step.meeting_s for step in chosen), _sum(chosen, "wall_s")
    if wall and waiting >= EXPOSED_SHARE * wall:
        name, _ = _longest_wait(chosen, on_link=False)
        yield Finding(
            FindingKind.HINT,
            f"overlapped steps wait {waiting / wall:.0%} of their time for a few bytes (most for {name}) from slower "
            f"ranks: some rank has more to do, or shares its core.",
            {"share": waiting / wall},
        )


def _longest_wait(steps: Iterable[StepRecord], *, on_link: bool) -> tuple[str, float]:
    waits: dict[str, float] = {}
    for step in steps:
        for name, seconds in step.waits_s.items():
            if (name in step.sent) == on_link:
                waits[name] = waits.get(name, 0.0) + seconds
    return max(waits.items(), key=lambda item: item[1])


def hand_offs(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find overlapped steps in which hand-offs take long."""
    chosen = [step for step in _overlapped(steps) if step.handoffs]
    lost, wall = _sum(chosen, "handoff_s"), _sum(chosen, "wall_s")
    if not wall or lost < HAND_OFF_SHARE * wall:
        return
    count = sum(step.handoffs for step in chosen)
    yield Finding(
        FindingKind.PROBLEM,
        f"hand-offs take {lost / wall:.0%} of overlapped steps: {count / len(chosen):.0f} in a step, "
        f"{lost / count * 1e6:.0f} us each. Where that is far above `ubatch bench handoff`, other threads keep the "
        f"core busy; else steps are too small, or the schedule has too many points.",
        {"share": lost / wall, "per_step": count / len(chosen), "each_s": lost / count},
    )


def idle(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find overlapped steps with time in which no lane computes, waits or hands over, outside the lanes too."""
    chosen = _overlapped(steps)
    whole = sum(step.call_s for step in chosen)
    used = _sum(chosen, "compute_s") + _sum(chosen, "exposed_s") + _sum(chosen, "handoff_s")
    if whole and (whole - used) / whole >= IDLE_SHARE:
        lost = (whole - used) / len(chosen)
        yield Finding(
            FindingKind.HINT,
            f"{(whole - used) / whole:.0%} of overlapped steps ({lost * 1e3:.2f} ms of each) goes into cutting the "
            f"batch, starting lanes and merging: larger steps spread it.",
            {"share": (whole - used) / whole, "each_s": lost},
        )


def uneven(steps: Sequence[StepRecord]) -> Iterable[Finding]:
    """Find lanes or ranks that compute longer than the others."""
    chosen = _overlapped(steps)
    advice = {"lane": "splitting by cost evens it out", "rank": "its experts or requests have more to do"}
    shares = {
        "lane": [step.lane_compute_s for step in chosen if step.lane_compute_s],
        "rank": [step.rank_compute_s for step in chosen],
    }
    for what, times in shares.items():
        if len(times) < LEAST_STEPS or len({len(each) for each in times}) != 1 or len(times[0]) < 2:
            continue
        means = [fmean(column) for column in zip(*times, strict=True)]
        most, average = max(means), fmean(means)
        if average and most / average >= UNEVEN:
            yield Finding(
                FindingKind.HINT,
                f"{what} {means.index(most)} computes {most / average:.2f}x as long as the mean of all {len(means)} "
                f"({most * 1e3:.2f} against {average * 1e3:.2f} ms in an overlapped step): {advice[what]}.",
                {"ratio": most / average},
            )


def _overlapped(steps: Iterable[StepRecord]) -> list[StepRecord]:
    return [step for step in steps if step.overlapped]


def _sum(steps: Iterable[StepRecord], name: str) -> float:
    return sum(getattr(step.summary, name) for step in steps)
