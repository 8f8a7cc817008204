"""Compare observations with what a server promises; returns the faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.workbench.bench.server.abuse.rounds import Hang, Round
from serving.workbench.bench.server.abuse.watch import Seen

_GIGABYTE = 10**9
_SLOWEST_HEALTH_S = 1.0
_LONGEST_WAIT_S = 2.0
"""Longest wait of a short request behind a large body: some steps, however many prompts that body has."""
_GAP_RATIO = 3.0
_MEMORY_GROWTH = 1.05
"""Largest growth factor from the second round on; the first round fills caches and the allocator's pools."""
_NOTICED_LATER_S = 5.0
"""Seconds allowed beyond the server's `timeout_s`, because heartbeats are checked at intervals."""


@dataclass(frozen=True)
class Row:
    """The results of a window.

    Attributes:
        answers: answer -> how often it occurred.
        waits_s: seconds that short requests waited.
        unexpected: answers that are not allowed, and required ones that are missing, as `no 503`.
        health_s: seconds of the slowest `/health`; 0 in a window too short for one.
        unhealthy: answers of `/health` other than 200.
    """

    name: str
    seconds: float
    answers: Mapping[str, int]
    waits_s: Sequence[float]
    unexpected: Sequence[str]
    health_s: float
    unhealthy: Sequence[str]
    seen: Seen


def faults_of_windows(rows: Sequence[Row]) -> list[str]:
    """Faults while the streams ran."""
    faults: list[str] = []
    for row in rows:
        seen = row.seen
        broken = {
            f"answered {', '.join(row.unexpected)}": row.unexpected,
            f"/health gave {', '.join(row.unhealthy[:5])}": row.unhealthy,
            f"/health took {row.health_s:.2f} s": row.health_s >= _SLOWEST_HEALTH_S,
            f"{seen.wrong} streams got a wrong token": seen.wrong,
            f"{len(seen.failed)} streams failed, the first with {seen.failed[:1]}": seen.failed,
            "the streams stood still": seen.gap_p99_s is None,
        }
        broken |= {f"a short request waited {wait:.2f} s": wait > _LONGEST_WAIT_S for wait in row.waits_s}
        faults += [f"{row.name}: {what}" for what, is_so in broken.items() if is_so]
    ratio = stretch(rows)
    if ratio is not None and ratio >= _GAP_RATIO:
        faults.append(f"inter-token p99 rose {ratio:.2f} times while long prompts arrived")
    return faults


def stretch(rows: Sequence[Row]) -> float | None:
    """Streams' inter-token p99 while long prompts arrive / the p99 without them; None if none arrived."""
    alone = next((row.seen.gap_p99_s for row in rows if row.name == "streams alone"), None)
    arriving = next((row.seen.gap_p99_s for row in rows if "arrive" in row.name), None)
    return arriving / alone if arriving is not None and alone is not None else None


def faults_of_memory(peak: int, overlapped: int) -> list[str]:
    """Faults in the API process's peak memory (bytes) and in the number of steps that ran in lanes."""
    faults = [f"the API process took {peak / 1e9:.2f} GB"] if peak >= _GIGABYTE else []
    return faults + (["no step overlapped"] if not overlapped else [])


def faults_of_rounds(done: Sequence[Round], streams: int) -> list[str]:
    """Faults in rounds of `streams` streams; memory is only compared if there are three rounds or more."""
    faults: list[str] = []
    for number, each in enumerate(done, 1):
        broken = {
            f"{each.failed} streams failed, the first with {each.first_error}": each.failed,
            f"{streams - each.ok - each.cancelled - each.failed} streams have no end": (
                each.ok + each.cancelled + each.failed != streams
            ),
            "nobody left": not each.cancelled,
            f"{each.wrong} streams got a wrong token": each.wrong,
            f"the engines hold {each.held}": each.held is not None,
        }
        faults += [f"round {number}: {what}" for what, is_so in broken.items() if is_so]
    for place, (early, late) in enumerate(zip(done[1].resident, done[-1].resident, strict=True) if done[2:] else ()):
        if late > early * _MEMORY_GROWTH:
            whose = f"engine {place - 1}" if place else "the API process"
            faults.append(f"{whose} grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB")
    return faults


def faults_of_hang(seen: Hang, timeout_s: float) -> list[str]:
    """Faults after a rank was stopped, on a server with this `timeout_s`."""
    unnamed = [error for error in seen.errors if f"rank {seen.rank}" not in error]
    broken = {
        "/health did not say in time that a rank hung": (
            seen.unhealthy_s is None or seen.unhealthy_s > timeout_s + _NOTICED_LATER_S
        ),
        f"streams ended without the rank's name, the first with {unnamed[:1]}": unnamed,
        f"the server ended with {seen.exit_status}, not as after a failure": (seen.exit_status or 0) <= 0,
    }
    return [what for what, is_so in broken.items() if is_so]
