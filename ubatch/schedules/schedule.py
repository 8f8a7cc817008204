"""Schedules are data: how many lanes and chunks, which points are active, how far lane 0 leads.

    lanes x chunks     name in the field
    1 x 1              serial
    1 x k              single-batch overlap; 1 x 1, too, where combine is signalled
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
from typing import Any

from ubatch.errors import ConfigError, nearest

__all__ = ["KNOWN_POINTS", "SCHEDULES", "SERIAL", "Point", "Recv", "Schedule", "SharedExpert", "get_schedule"]


class Point(StrEnum):
    """The points that this project's own models and kernels pass, in the order of a layer.

    The gathers and scatters are those of tensor-parallel attention; with one rank per replica none of them is passed.
    """

    ATTN_GATHER = "attn_gather"
    """after the all-gather of what attention reads was launched"""
    ATTN_PREPARE = "attn_prepare"
    """after the input norm and the qkv projection, before the core attention"""
    ATTN_SCATTER = "attn_scatter"
    """after the reduce-scatter of attention's partial sums was launched"""
    MLP_GATHER = "mlp_gather"
    """after the all-gather of what a dense MLP reads was launched"""
    SELECT = "select"
    """after the router's choice, before dispatch is launched"""
    DISPATCH = "dispatch"
    """after dispatch was launched"""
    COMBINE = "combine"
    """after combine was launched"""
    OUTPUT = "output"
    """after combine arrived, before the residual is added"""
    MLP_SCATTER = "mlp_scatter"
    """after the reduce-scatter of a dense MLP's partial sums was launched"""
    LAYER = "layer"
    """the end of a decoder layer"""
    FINAL_GATHER = "final_gather"
    """after the all-gather of the last hidden states was launched"""
    COLLECTIVE = "collective"
    """after a collective of `ubatch.ranks.collectives` was launched"""


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
        comm_sms: a GPU's streaming multiprocessors that compute kernels leave to communication kernels, where both
            can obey (`ubatch.streams.sm_budget`); 0 shares all of them, and GEMMs leave no tile to a program that finds
            none.
        signalled: a combine begins block by block while its experts are still computed. Told by signals on the device,
            which needs `comm_sms` there, or by the host between blocks of experts: as transport and experts can.
    """

    name: str
    lanes: int = 2
    chunks: int = 1
    chunk_dispatch: bool = True
    lead: int = 0
    points_off: frozenset[str] = _INSIDE_A_LAYER
    shared_expert: SharedExpert = SharedExpert.COMBINE
    recv: Recv = Recv.OWNER
    comm_sms: int = 0
    signalled: bool = False

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ConfigError(f"schedule {self.name!r}: lanes must be at least 1, not {self.lanes}.")
        if self.chunks < 1:
            raise ConfigError(f"schedule {self.name!r}: chunks must be at least 1, not {self.chunks}.")
        if self.lead < 0:
            raise ConfigError(f"schedule {self.name!r}: lead must be at least 0, not {self.lead}.")
        if self.comm_sms < 0:
            raise ConfigError(f"schedule {self.name!r}: comm_sms must be at least 0, not {self.comm_sms}.")
        unknown = sorted(self.points_off - KNOWN_POINTS)
        if unknown:
            raise ConfigError(
                f"schedule {self.name!r}: points_off has unknown point {unknown[0]!r}"
                f"{nearest(unknown[0], KNOWN_POINTS)}"
            )
        object.__setattr__(self, "points_off", frozenset(str(point) for point in self.points_off))
        object.__setattr__(self, "shared_expert", SharedExpert(self.shared_expert))
        object.__setattr__(self, "recv", Recv(self.recv))

    @property
    def single_batch(self) -> bool:
        """Whether a batch overlaps without being split: one lane, with chunks or a signalled combine."""
        return self.lanes == 1 and self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether anything overlaps at all."""
        return self.lanes > 1 or self.chunks > 1 or self.signalled

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
            + (f", {self.comm_sms} SMs for communication" if self.comm_sms else "")
            + (", combine signalled" if self.signalled else "")
        )

    def with_lanes(self, lanes: int) -> Schedule:
        """This schedule for another number of lanes."""
        return self if lanes == self.lanes else replace(self, lanes=lanes)

    def one_by_one(self) -> Schedule:
        """The same work in the same pieces, one lane after the other: for measuring its stages."""
        return Schedule(
            "one_by_one",
            lanes=self.lanes,
            chunks=self.chunks,
            chunk_dispatch=self.chunk_dispatch or self.chunks == 1,
            points_off=KNOWN_POINTS,
            shared_expert=self.shared_expert,
            comm_sms=self.comm_sms,
            signalled=self.signalled,
        )

    def to_mapping(self) -> dict[str, object]:
        """All of it but the name, as plain values: what a YAML file says of a schedule of one's own."""
        return {
            "lanes": self.lanes,
            "chunks": self.chunks,
            "chunk_dispatch": self.chunk_dispatch,
            "lead": self.lead,
            "points_off": sorted(self.points_off),
            "shared_expert": str(self.shared_expert),
            "recv": str(self.recv),
            "comm_sms": self.comm_sms,
            "signalled": self.signalled,
        }

    @classmethod
    def from_mapping(cls, name: str, values: Mapping[str, object]) -> Schedule:
        """From plain values, keys in snake or kebab case; what is not named is as in a new `Schedule`.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a wrong type or value.
        """
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            field = str(key).replace("-", "_")
            if field not in _FIELDS:
                raise ConfigError(f"schedule {name!r}: unknown key {key!r}{nearest(field, _FIELDS)}")
            if field in arguments:
                raise ConfigError(f"schedule {name!r}: {key!r} is given twice, with hyphens and with underscores.")
            if type(value) not in _FIELDS[field]:
                expected = " or ".join(kind.__name__ for kind in _FIELDS[field])
                raise ConfigError(
                    f"schedule {name!r}: {key} must be {expected}, not {value!r} ({type(value).__name__})."
                )
            arguments[field] = value
        if "points_off" in arguments:
            arguments["points_off"] = frozenset(map(str, arguments["points_off"]))
        for field, kind in (("shared_expert", SharedExpert), ("recv", Recv)):
            known = tuple(kind)
            if field in arguments and arguments[field] not in known:
                raise ConfigError(
                    f"schedule {name!r}: unknown {field} {arguments[field]!r}{nearest(arguments[field], known)}"
                )
        return cls(name, **arguments)


_FIELDS: Mapping[str, tuple[type, ...]] = {
    "lanes": (int,),
    "chunks": (int,),
    "chunk_dispatch": (bool,),
    "lead": (int,),
    "points_off": (list, tuple),
    "shared_expert": (str,),
    "recv": (str,),
    "comm_sms": (int,),
    "signalled": (bool,),
}

SERIAL = Schedule("serial", lanes=1)

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        SERIAL,
        # vLLM: hand on once after dispatch and once after combine; the shared expert hides combine.
        Schedule("mlp_shared_overlap"),
        # SGLang, prefill: the same two points, the shared expert after the baton came back.
        Schedule("two_batch_prefill", shared_expert=SharedExpert.COMBINE_RETURN),
        # SGLang, decode of DeepSeek: five stages a layer, lane 1 two stages behind.
        Schedule(
            "two_batch_decode",
            lead=2,
            points_off=frozenset({Point.LAYER}),
            shared_expert=SharedExpert.DISPATCH,
        ),
        # SGLang, decode of Qwen3 and MiMo-V2: what combine brought is added in the stage that waited for it.
        Schedule(
            "two_batch_decode_qwen3",
            lead=2,
            points_off=frozenset({Point.OUTPUT}),
            shared_expert=SharedExpert.DISPATCH,
        ),
        # Of this project, for tensor-parallel attention: between its scatter and the dispatch, and between the combine
        # and the next gather, a lane has little to compute. Handing on in the middle of attention as well, a stage
        # apart, the other one has enough. (Ideal machine, 2 lanes: 0.999 of the bound instead of 0.934.)
        Schedule(
            "two_batch_tensor_parallel",
            lead=1,
            points_off=frozenset({Point.SELECT, Point.OUTPUT, Point.LAYER}),
            shared_expert=SharedExpert.COMBINE_RETURN,
        ),
        # SGLang's single-batch overlap, with the dispatch in chunks too.
        Schedule("single_batch", lanes=1, chunks=2),
        # SGLang's, inside one chunk: the combine begins while the experts are still computed.
        Schedule("single_batch_signalled", lanes=1, comm_sms=16, signalled=True),
    )
}


def get_schedule(name: str) -> Schedule:
    """The named schedule.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}")
    return SCHEDULES[name]


def check_runnable(schedule: Schedule) -> None:
    """Refuse a schedule that could give ranks a different order of collectives, before anything is launched.

    Who runs next follows from the number of lanes, the lead and the active points alone (`ubatch.schedules.ring`), and
    the ranks vote on all of them; so a schedule that is data cannot. What could:

        a subclass            its answers may depend on anything, the rank included
        recv=peer, one lane   has no peer: a hook that nobody is there to run

    Chunks, the shared expert's place and the receiver move launches inside a lane's own stages, on all ranks alike. A
    lead of more points than the model has lets lane 0 run to its end first, also on all ranks alike. What no schedule
    can promise is that all lanes of the model pass the same points: `UBATCH_CHECK_ORDER=1` looks at that at run time.

    Raises:
        ConfigError: it is one of these.
    """
    if type(schedule) is not Schedule:
        raise ConfigError(
            f"schedule {schedule.name!r} is a {type(schedule).__name__}. A schedule is data, which ranks compare: make "
            "it a Schedule; its fields say all that one may decide."
        )
    if schedule.recv is Recv.PEER and schedule.lanes == 1:
        raise ConfigError(
            f"schedule {schedule.name!r} has one lane and recv=peer: no peer is there to run its receive hooks. Leave "
            "recv out."
        )
