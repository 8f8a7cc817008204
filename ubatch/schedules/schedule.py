"""Schedules as data: numbers of lanes and chunks, active points, lead of lane 0.

    lanes x chunks     common name
    1 x 1              serial
    1 x k              single-batch overlap; also 1 x 1 if combine is signalled
    2 x 1              dual-batch overlap (vLLM), two-batch overlap (SGLang)
    n x k              both at once

A *point* is a named place in the model where a lane may hand the baton on. A named schedule may switch *known*
points off; a point it does not know (a user's own, or an unnamed `dbo_yield()`) is always active. Every lane on
every rank must pass the same points equally often, so a schedule never depends on a lane's data.

This module imports neither torch nor threads; `ring` and `simulate` read it too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import get_type_hints

from ubatch.errors import ConfigError, check_known, check_type, named_values, nearest, shown


class Point(StrEnum):
    """The points that this project's own models and kernels pass, in the order of a layer.

    The gathers and scatters are those of tensor-parallel attention; with one rank per replica none of them is passed.
    """

    ATTN_GATHER = "attn_gather"
    """after launching the all-gather of attention's input"""
    QK_GATHER = "qk_gather"
    """after launching the all-gather of mean squares, where queries and keys are normalised over all heads"""
    ATTN_PREPARE = "attn_prepare"
    """after the input norm and the qkv projection, before the core attention"""
    ATTN_SCATTER = "attn_scatter"
    """after launching the reduce-scatter of attention's partial sums"""
    MLP_GATHER = "mlp_gather"
    """after launching the all-gather of a dense MLP's input"""
    SELECT = "select"
    """after the router's choice, before dispatch is launched"""
    DISPATCH = "dispatch"
    """after launching dispatch"""
    COMBINE = "combine"
    """after launching combine"""
    OUTPUT = "output"
    """after combine arrived, before the residual is added"""
    MLP_SCATTER = "mlp_scatter"
    """after launching the reduce-scatter of a dense MLP's partial sums"""
    LAYER = "layer"
    """the end of a decoder layer"""
    FINAL_GATHER = "final_gather"
    """after launching the all-gather of the last hidden states"""
    COLLECTIVE = "collective"
    """after launching a collective of `ubatch.ranks.collectives`"""


LINEAR_ATTENTION = "linear_attention"
"""Kind of a layer, told at its `ATTN_PREPARE`: linear attention. Layers with full attention tell none."""


class SharedExpert(StrEnum):
    """Where the shared expert runs."""

    DISPATCH = "dispatch"
    """after launching dispatch, before the hand-off"""
    COMBINE = "combine"
    """after launching combine, before the hand-off"""
    COMBINE_RETURN = "combine_return"
    """after the hand-off at combine, before waiting for it"""


class Recv(StrEnum):
    """Which lane runs a receive hook: the one that registered it, or the next lane before its own next launch."""

    OWNER = "owner"
    PEER = "peer"


KNOWN_POINTS: frozenset[str] = frozenset(Point)
_INSIDE_A_LAYER = frozenset({Point.ATTN_PREPARE, Point.SELECT, Point.OUTPUT, Point.LAYER})


_LONGEST_NAME = 100


@dataclass(frozen=True)
class Schedule:
    """One way to interleave lanes.

    Attributes:
        name: its name in `--schedule` and in the YAML file.
        lanes: microbatches; 1 runs unsplit.
        chunks: blocks of experts with their own combine, and
        chunk_dispatch: their own dispatch too; one dispatch for all of them where this is False.
        lead: lane 0 keeps the baton through its first `lead` points.
        points_off: known points at which the baton is *not* handed on.
        shared_expert: where the shared expert runs.
        recv: which lane runs a receive hook.
        comm_sms: streaming multiprocessors of a GPU that compute kernels leave to communication kernels, if both
            support it (`ubatch.SMBudget`). 0 reserves none; the grouped GEMM then distributes its tiles
            dynamically.
        signalled: combine starts block by block while later experts are still computed. Transport and experts determine
            how it is triggered: by signals on the device, which needs `comm_sms`, or by the host between blocks of
            experts.
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
        if len(self.name) > _LONGEST_NAME:
            raise ConfigError(f"schedule {shown(self.name)}: its name has more than {_LONGEST_NAME} characters.")
        for field, least in (("lanes", 1), ("chunks", 1), ("lead", 0), ("comm_sms", 0)):
            value = getattr(self, field)
            if value < least:
                raise ConfigError(f"schedule {self.name!r}: {field} must be at least {least}, not {value}.")
        points_off = frozenset(map(str, self.points_off))
        unknown = sorted(points_off - KNOWN_POINTS)
        if unknown:
            raise ConfigError(
                f"schedule {self.name!r}: points_off has unknown point {shown(unknown[0])}"
                f"{nearest(unknown[0], KNOWN_POINTS)}"
            )
        object.__setattr__(self, "points_off", points_off)
        for field, kind in (("shared_expert", SharedExpert), ("recv", Recv)):
            value, known = getattr(self, field), tuple(kind)
            check_known(field, value, known, f"schedule {self.name!r}: ")
            object.__setattr__(self, field, kind(value))

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
        """The whole schedule in one line, equal in every process (sets are sorted); ranks compare it."""
        off = ",".join(sorted(self.points_off))
        chunks = "chunks" if self.chunk_dispatch else "chunks of combine"
        return (
            f"{self.name}: {self.lanes} lanes x {self.chunks} {chunks}, lead {self.lead}, off: {off}, "
            f"shared expert at {self.shared_expert}, received by {self.recv}"
            + (f", {self.comm_sms} SMs for communication" if self.comm_sms else "")
            + (", combine signalled" if self.signalled else "")
        )

    @cached_property
    def fingerprint(self) -> int:
        """`ubatch.fingerprint` of the line: what a vote carries."""
        return zlib.crc32(self.describe().encode())

    def with_lanes(self, lanes: int) -> Schedule:
        """This schedule for another number of lanes."""
        return self if lanes == self.lanes else replace(self, lanes=lanes)

    def one_by_one(self) -> Schedule:
        """The same work in the same pieces, one lane after the other: for measuring its stages."""
        return replace(
            self,
            name="one_by_one",
            chunk_dispatch=self.chunk_dispatch or self.chunks == 1,
            lead=0,
            points_off=KNOWN_POINTS,
            recv=Recv.OWNER,
        )

    def to_mapping(self) -> dict[str, object]:
        """All fields except the name, as plain values: the form of a user's own schedule in a YAML file."""
        values = {field: getattr(self, field) for field in _FIELDS}
        enums = {"shared_expert": str(self.shared_expert), "recv": str(self.recv)}
        return values | enums | {"points_off": sorted(self.points_off)}

    @classmethod
    def from_mapping(cls, name: str, values: Mapping[str, object]) -> Schedule:
        """Make a schedule from plain values, keys in snake or kebab case; missing keys take `Schedule`'s defaults.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a wrong type or value.
        """
        arguments = named_values(values, _FIELDS, f"schedule {shown(name)}: ")
        for key, (field, value) in zip(values, arguments.items(), strict=True):
            check_type(f"schedule {shown(name)}: {key}", value, *_FIELDS[field])
        return cls(name, **arguments)


_FIELDS: Mapping[str, tuple[type, ...]] = {
    **{name: (kind,) for name, kind in get_type_hints(Schedule).items() if name != "name"},
    **{"points_off": (list, tuple), "shared_expert": (str,), "recv": (str,)},
}
"""Field -> the classes that its plain value may have."""

SERIAL = Schedule("serial", lanes=1)

_NAMED = (
    SERIAL,
    # vLLM: hand on once after dispatch and once after combine; the shared expert hides combine.
    Schedule("mlp_shared_overlap"),
    # SGLang, prefill: the same two points, the shared expert after the baton came back.
    Schedule("two_batch_prefill", shared_expert=SharedExpert.COMBINE_RETURN),
    # SGLang, decode of DeepSeek: five stages a layer, lane 1 two stages behind.
    Schedule("two_batch_decode", lead=2, points_off=frozenset({Point.LAYER}), shared_expert=SharedExpert.DISPATCH),
    # SGLang, decode of Qwen3 and MiMo-V2: combine's result is added in the stage that waited for it.
    Schedule(
        "two_batch_decode_qwen3", lead=2, points_off=frozenset({Point.OUTPUT}), shared_expert=SharedExpert.DISPATCH
    ),
    # This project's, for tensor-parallel attention: a lane has little compute between the scatter and the dispatch,
    # and between the combine and the next gather. So lanes also hand on in the middle of attention, one stage
    # apart, which gives the other lane enough to compute. (Ideal machine, 2 lanes: 0.999 of the bound instead of
    # 0.934.)
    Schedule(
        "two_batch_tensor_parallel",
        lead=1,
        points_off=frozenset({Point.SELECT, Point.OUTPUT, Point.LAYER}),
        shared_expert=SharedExpert.COMBINE_RETURN,
    ),
    # SGLang's single-batch overlap, with the dispatch in chunks too.
    Schedule("single_batch", lanes=1, chunks=2),
    # SGLang's, inside one chunk: the combine starts while the experts are still computed.
    Schedule("single_batch_signalled", lanes=1, comm_sms=16, signalled=True),
)
"""Add one here, and it has its name everywhere: in settings, flags and their help, the simulator and the tests."""

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _NAMED}


def get_schedule(name: str) -> Schedule:
    """The named schedule.

    Raises:
        ConfigError: the name is unknown.
    """
    check_known("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def check_runnable(schedule: Schedule) -> None:
    """Refuse a schedule that could give ranks a different order of collectives, before anything is launched.

    The order of lanes depends only on the number of lanes, the lead and the active points (`ubatch.schedules.ring`),
    and the ranks vote on all of these. So a plain `Schedule` is safe. Refused are:

        a subclass            its methods may depend on anything, even the rank
        recv=peer, one lane   there is no peer to run the hook

    Chunks, the shared expert's place and the receiver move launches inside a lane's own stages, on all ranks alike. If
    the lead exceeds the model's points, lane 0 runs to its end first, also on all ranks alike. No schedule can
    guarantee that all lanes of the model pass the same points: `UBATCH_CHECK_ORDER=1` checks that at run time.

    Raises:
        ConfigError: the schedule is one of these.
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
