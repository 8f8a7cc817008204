"""Schedules are data: how many lanes and chunks, which points are active, how far lane 0 leads.

    lanes x chunks     name in the field
    1 x 1              serial
    1 x k              single-batch overlap
    2 x 1              dual-batch overlap (vLLM), two-batch overlap (SGLang)
    n x k              both at once

A *point* is a named place in the model where a lane may hand the baton on. A named schedule may switch *known*
points off; a point it does not know (a user's own, or an unnamed `dbo_yield()`) is always active. Every lane on
every rank must pass the same points equally often, so a schedule never depends on a lane's data.

This module imports neither torch nor threads; `ring` and `simulate` read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ubatch.errors import ConfigError, nearest

__all__ = ["KNOWN_POINTS", "SCHEDULES", "SERIAL", "Point", "Recv", "Schedule", "SharedExpert", "get_schedule"]


class Point(StrEnum):
    """The points that this project's own models and kernels pass, in the order of a layer."""

    ATTN_PREPARE = "attn_prepare"
    """after the input norm and the qkv projection, before the core attention"""
    SELECT = "select"
    """after the router's choice, before dispatch is launched"""
    DISPATCH = "dispatch"
    """after dispatch was launched"""
    COMBINE = "combine"
    """after combine was launched"""
    OUTPUT = "output"
    """after combine arrived, before the residual is added"""
    LAYER = "layer"
    """the end of a decoder layer"""
    COLLECTIVE = "collective"
    """after a collective of `ubatch.collectives` was launched"""


class SharedExpert(StrEnum):
    """Where the shared expert runs."""

    DISPATCH = "dispatch"
    """between dispatch's launch and its hand-off"""
    COMBINE = "combine"
    """between combine's launch and its hand-off"""
    COMBINE_RETURN = "combine_return"
    """after combine's hand-off, before its wait"""


class Recv(StrEnum):
    """Who runs a receive hook: the lane that registered it, or the next one before its own next launch."""

    OWNER = "owner"
    PEER = "peer"


KNOWN_POINTS: frozenset[str] = frozenset(Point)
_INSIDE_A_LAYER = frozenset({Point.ATTN_PREPARE, Point.SELECT, Point.OUTPUT, Point.LAYER})


@dataclass(frozen=True)
class Schedule:
    """One way to interleave lanes.

    Attributes:
        name: what `--schedule` and the YAML file call it.
        lanes: microbatches; 1 runs unsplit.
        chunks: blocks of experts with their own combine, and
        chunk_dispatch: their own dispatch too; one dispatch for all of them where this is False.
        lead: lane 0 keeps the baton through its first `lead` points.
        points_off: known points at which the baton is *not* handed on.
        shared_expert: where the shared expert runs.
        recv: who runs a receive hook.
    """

    name: str
    lanes: int = 2
    chunks: int = 1
    chunk_dispatch: bool = True
    lead: int = 0
    points_off: frozenset[str] = _INSIDE_A_LAYER
    shared_expert: SharedExpert = SharedExpert.COMBINE
    recv: Recv = Recv.OWNER

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ConfigError(f"schedule {self.name!r}: lanes must be at least 1, not {self.lanes}.")
        if self.chunks < 1:
            raise ConfigError(f"schedule {self.name!r}: chunks must be at least 1, not {self.chunks}.")
        if self.lead < 0:
            raise ConfigError(f"schedule {self.name!r}: lead must be at least 0, not {self.lead}.")
        unknown = sorted(self.points_off - KNOWN_POINTS)
        if unknown:
            raise ConfigError(
                f"schedule {self.name!r}: points_off has unknown point {unknown[0]!r}"
                f"{nearest(unknown[0], KNOWN_POINTS)}"
            )
        object.__setattr__(self, "points_off", frozenset(str(point) for point in self.points_off))
        object.__setattr__(self, "shared_expert", SharedExpert(self.shared_expert))
        object.__setattr__(self, "recv", Recv(self.recv))

    def active(self, point: str) -> bool:
        """Whether a lane that passes `point` hands the baton on there."""
        return point not in self.points_off

    def describe(self) -> str:
        """All of it in one line that is the same in every process (a set's own order is not); ranks compare it."""
        off = ",".join(sorted(self.points_off))
        chunks = "chunks" if self.chunk_dispatch else "chunks of combine"
        return (
            f"{self.name}: {self.lanes} lanes x {self.chunks} {chunks}, lead {self.lead}, off: {off}, "
            f"shared expert at {self.shared_expert}, received by {self.recv}"
        )

    def with_lanes(self, lanes: int) -> Schedule:
        """This schedule for another number of lanes."""
        return self if lanes == self.lanes else replace(self, lanes=lanes)


SERIAL = Schedule("serial", lanes=1)

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        SERIAL,
        # vLLM: hand on once after dispatch and once after combine; the shared expert hides combine.
        Schedule("mlp_shared_overlap"),
        # SGLang, prefill: the same two points, the shared expert after the baton came back.
        Schedule("two_batch_prefill", shared_expert=SharedExpert.COMBINE_RETURN),
        # SGLang, decode: five stages a layer, lane 1 two stages behind.
        Schedule(
            "two_batch_decode",
            lead=2,
            points_off=frozenset({Point.LAYER}),
            shared_expert=SharedExpert.DISPATCH,
        ),
        Schedule("single_batch", lanes=1, chunks=2),
    )
}


def get_schedule(name: str) -> Schedule:
    """The named schedule.

    Raises:
        ConfigError: the name is unknown, or the schedule needs expert chunks, which no kernel runs yet.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}")
    schedule = SCHEDULES[name]
    check_runnable(schedule)
    return schedule


def check_runnable(schedule: Schedule) -> None:
    """Refuse what the runtime cannot execute yet, before anything is launched."""
    if schedule.chunks > 1:
        raise ConfigError(
            f"schedule {schedule.name!r} splits experts into {schedule.chunks} chunks, which the MoE kernel does not "
            "run yet. Choose one with chunks = 1: mlp_shared_overlap, two_batch_decode, two_batch_prefill, serial."
        )
