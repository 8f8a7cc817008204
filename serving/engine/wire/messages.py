"""The messages between the API process and the engines: tagged msgspec structs, in MessagePack.

    to an engine      Add, Abort, Wake, Rearrange, StartProfile, StopProfile, Shutdown
    from an engine    Ready, Alive, Outputs, Loads, Moved, Refused, Failed, ProfileWritten; Finished at the end of a job
    from a node       NodeAlive, NodeFound, and Failed for an engine of it that died
    to a follower     Turn, from the leader of its tensor-parallel group (see `lockstep`)

Every engine reads one socket, in order. It sends the number of `Add`s and `Abort`s that it has handled in each
`Outputs`, so the client knows which messages the outputs take into account. `Add` and `Wake` carry an `epoch`, the
client's count of all requests: engines that step together pause only when all have seen the same one (see `process`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from attention import KVCacheExhausted
from model_runner import CheckpointError, CheckpointFileMissing, RequestError, TokenIds
from moe import ExpertPlacement
from moe.balance import Ints
from serving.engine.kept import InStep
from serving.engine.restarts import RestartReason
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from ubatch import ConfigError, UBatchError

_NO_STEP = InStep()


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What all messages have in common: they are tagged with the name of their class."""


class Add(_Message, frozen=True):
    """Serve a request."""

    request: RequestInput
    epoch: int


class Abort(_Message, frozen=True):
    """Abort a request, which may have ended already."""

    request_id: str


class Admit(_Message, frozen=True):
    """From the leader of a tensor-parallel group to all of its ranks: put a request into the queue whose grammar the
    leader has made (see `EngineCore.admit`)."""

    request_id: str


class Wake(_Message, frozen=True):
    """Another rank got request number `epoch`: run steps together with it."""

    epoch: int


class Rearrange(_Message, frozen=True):
    """Move experts to another placement (`model_runner.balance`); all ranks get it, and a `Wake` behind it.

    Attributes:
        number: of the order, above those of earlier ones.
        layers: the MoE layers that change, in the order in which they do.
        slots: `[layers, R * S]` int64: the experts in their slots.
    """

    number: int
    layers: Sequence[int]
    slots: bytes

    @classmethod
    def of(cls, number: int, placement: ExpertPlacement, layers: Sequence[int]) -> Rearrange:
        """The order to move these layers to a placement."""
        return cls(number, list(layers), placement.experts[list(layers)].tobytes())

    def placement(self, in_force: ExpertPlacement) -> ExpertPlacement:
        """The placement to move to, from the one in force."""
        experts = in_force.experts.copy()
        experts[list(self.layers)] = np.frombuffer(self.slots, dtype=np.int64).reshape(len(self.layers), -1)
        return ExpertPlacement(experts, in_force.num_experts, in_force.num_ranks)


class StartProfile(_Message, frozen=True):
    """Start to record steps."""


class StopProfile(_Message, frozen=True):
    """Stop recording, and write the trace, every rank to a file of its own, in the folder that it was started with.

    Attributes:
        name: start of the files' names; `-rank-N.json` is added.
    """

    name: str


class Shutdown(_Message, frozen=True):
    """End the process, even if requests still run."""


class NodeHeard(_Message, frozen=True):
    """Node 0's answer to `NodeAlive`; it also comes unasked when the run has failed.

    Attributes:
        failure: why the run has failed; empty if it has not.
        again: node 0 begins another run, which the node may join.
        deciding: node 0 asks for `NodeFound`, and says next whether it begins another run.
    """

    failure: str = ""
    again: bool = False
    deciding: bool = False


class Ready(_Message, frozen=True):
    """The rank has loaded its model and can serve.

    Attributes:
        memory: memory held by the rank's KV cache and attention back ends, as text.
        num_kv_blocks: blocks of its KV cache.
        experts: MoE layers, and experts of each; None for a dense model.
        slots: `[L, R * S]` int64: the experts in the slots of all ranks, from rank 0; empty from others, and for a
            dense model.
        expert_bytes: of one expert in one layer, if experts can move; else 0.
    """

    rank: int
    max_model_len: int
    vocab_size: int
    memory: str
    num_kv_blocks: int = 0
    experts: tuple[int, int] | None = None
    slots: bytes = b""
    expert_bytes: int = 0

    def placement(self, num_ranks: int) -> ExpertPlacement | None:
        """Where experts are; None where it is not said.

        Args:
            num_ranks: ranks that share them.
        """
        if self.experts is None or not self.slots:
            return None
        num_layers, num_experts = self.experts
        return ExpertPlacement(np.frombuffer(self.slots, np.int64).reshape(num_layers, -1), num_experts, num_ranks)


class Alive(_Message, frozen=True):
    """The heartbeat of a rank, idle or not, from `Ready` on.

    Attributes:
        silence_s: extra time beyond the time-out until its next heartbeat, in seconds, for an announced long call.
    """

    rank: int
    silence_s: float


class Outputs(_Message, frozen=True):
    """The outputs of a step.

    Attributes:
        rank: the sender's data-parallel rank, as in all messages about requests.
        received: number of `Add`s and `Abort`s that this rank has handled since it started.
    """

    rank: int
    received: int
    outputs: Sequence[RequestOutput]
    statistics: EngineStatistics


class Loads(_Message, frozen=True):
    """Load of the experts since the rank's last such message, of the tokens that it has itself.

    Attributes:
        steps: steps that it has run since, with tokens on any rank.
        prefill, decode: `[L, E]` int64, the tokens of these kinds of steps; empty if there were none.
    """

    rank: int
    steps: int
    prefill: bytes
    decode: bytes

    @classmethod
    def of(cls, rank: int, steps: int, counts: Ints) -> Loads:
        """From counts `[2, L, E]`."""
        prefill, decode = (kind.tobytes() if kind.any() else b"" for kind in counts)
        return cls(rank, steps, prefill, decode)

    def counts(self, experts: tuple[int, int]) -> Ints:
        """`[2, L, E]`.

        Args:
            experts: as of `Ready`.
        """
        counts = np.zeros((2, *experts), dtype=np.int64)
        for kind, told in zip(counts, (self.prefill, self.decode), strict=True):
            if told:
                kind[:] = np.frombuffer(told, dtype=np.int64).reshape(experts)
        return counts


class Moved(_Message, frozen=True):
    """From rank 0: all ranks have switched layers of an order, or have ended it (`model_runner.MoveNews`)."""

    rank: int
    number: int
    layers: Sequence[int]
    num_bytes: int
    over: bool
    failure: str


class Refused(_Message, frozen=True):
    """A request that cannot be served; `kind`, `text` and `param` as for `make_error`."""

    rank: int
    request_id: str
    kind: str
    text: str
    param: str | None = None


class Failed(_Message, frozen=True):
    """A rank ends because of an error, or it ended without a report: then there is only the text.

    Attributes:
        text: the error's, or what happened to the rank.
        kind: kind of the error, as for `make_error`.
        name: name of its class.
        traceback: its traceback; empty if the process died without a report.
        echo: the error is only that another rank failed.
        reason: how it failed.
        signal: number of the signal that ended it; 0 if none did.
        in_step: what it was doing, of a rank that reports its own error.
    """

    rank: int
    text: str
    kind: str = ""
    name: str = ""
    traceback: str = ""
    echo: bool = False
    reason: RestartReason = RestartReason.FAILED
    signal: int = 0
    in_step: InStep = _NO_STEP


class ProfileWritten(_Message, frozen=True):
    """The answer to `StopProfile`; `error` says why there is no file."""

    rank: int
    path: str
    error: str | None


class Finished(_Message, frozen=True):
    """From rank 0: the ranks have done their job (`EngineOptions.job`), and wait for `Shutdown`.

    Attributes:
        result: what they found, as text.
    """

    rank: int
    result: str


class NodeAlive(_Message, frozen=True):
    """The heartbeat of a node other than node 0."""

    node_rank: int


@dataclass(frozen=True)
class RankFound:
    """What is found of a rank after a failure.

    Attributes:
        in_step: what it was doing when it ended, or does now.
        state: of its process, as a letter of `/proc`; empty if it has ended, or nobody has looked.
    """

    in_step: InStep = _NO_STEP
    state: str = ""


class NodeFound(_Message, frozen=True):
    """From a node other than node 0: what it has found of each of its ranks, after one has ended, and when node 0 says
    that the run has failed."""

    node_rank: int
    ranks: Mapping[int, RankFound]


ToEngine: TypeAlias = Add | Abort | Admit | Wake | Rearrange | StartProfile | StopProfile | Shutdown | NodeHeard
FromEngine: TypeAlias = (
    Ready | Alive | Outputs | Loads | Moved | Refused | Failed | Finished | ProfileWritten | NodeAlive | NodeFound
)


class Turn(_Message, frozen=True):
    """The messages that a leader handles before a step, or during a pause.

    Attributes:
        told: checksum of all outputs of the leader's steps so far.
        messages: the messages.
    """

    number: int
    told: int
    messages: Sequence[ToEngine]


def _pack(value: object) -> bytes:
    if isinstance(value, TokenIds):
        return value.packed
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _unpack(kind: type, value: Any) -> TokenIds:
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds.unpack(value)
    raise TypeError(f"a {type(value).__name__} is no {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


def encode(message: ToEngine | FromEngine | Turn) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unpack).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
decode_turn: Callable[[bytes], Turn] = msgspec.msgpack.Decoder(Turn, dec_hook=_unpack).decode
"""Decode a message to an engine, from an engine or a node, or a turn from a leader. What is none raises
`msgspec.DecodeError`, and one with a value of a wrong type `msgspec.ValidationError`, which is a `DecodeError`."""


_ERRORS: dict[str, type[UBatchError]] = {
    kind.__name__: kind
    for kind in (CheckpointError, CheckpointFileMissing, ConfigError, KVCacheExhausted, RequestError, UBatchError)
}


def error_kind(error: BaseException) -> str:
    """The name of the nearest base class of `error` that `make_error` knows; its own class name if there is none."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), type(error).__name__)


def make_error(kind: str, text: str, param: str | None = None) -> UBatchError | None:
    """Make an error of the class that another process named in `kind`; None if the class is not this project's.
    `param` is the wrong parameter of a `RequestError`."""
    made = _ERRORS.get(kind)
    if made is RequestError:
        return RequestError(text, param=param)
    return None if made is None else made(text)
