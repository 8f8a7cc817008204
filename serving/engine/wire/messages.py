"""What the API process and the engines say to each other: tagged msgspec structs, in MessagePack.

    to an engine      Add, Abort, Wake, StartProfile, StopProfile, Shutdown; Unreadable is an Add that it could not read
    from an engine    Ready, Alive, Outputs, Refused, Failed, ProfileWritten
    from a node       NodeAlive, and Failed for an engine of it that died
    to a follower     Turn, from the leader of its tensor-parallel group (see `lockstep`)

Every engine reads one socket, in order. An engine counts the `Add`s and `Abort`s that it has handled and says so in
each `Outputs`, so that the client knows what the engine knew. `Add` and `Wake` carry an `epoch`, the client's count
of all requests: engines that step together pause only when all of them have seen the same one (see `process`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from attention import KVCacheExhausted
from model_runner import CheckpointError, CheckpointFileMissing, RequestError, TokenIds
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from ubatch import ConfigError, UBatchError

__all__ = [
    "Abort",
    "Add",
    "Alive",
    "Failed",
    "FromEngine",
    "NodeAlive",
    "Outputs",
    "ProfileWritten",
    "Ready",
    "Refused",
    "Shutdown",
    "StartProfile",
    "StopProfile",
    "ToEngine",
    "Turn",
    "Unreadable",
    "Wake",
    "decode_from_engine",
    "decode_to_engine",
    "decode_turn",
    "encode",
    "error_kind",
    "make_error",
]


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Serve a request."""

    request: RequestInput
    epoch: int


class Unreadable(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An `Add` of a request with a value of a wrong type: refused by itself, so that nothing else ends with it."""

    request_id: str
    epoch: int
    why: str


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget a request, which may have ended already."""

    request_id: str


class Wake(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Another rank got request number `epoch`: step along."""

    epoch: int


class StartProfile(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Record the following steps."""


class StopProfile(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write what was recorded, every rank to a file of its own.

    Attributes:
        prefix: of their paths; `-rank-N.json` follows.
    """

    prefix: str


class Shutdown(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End, whatever still runs."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model is loaded.

    Attributes:
        rank: whose.
        max_model_len: most tokens of a request.
        vocab_size: token ids are below it.
        memory: what the rank's KV cache and attention back ends hold, as text.
    """

    rank: int
    max_model_len: int
    vocab_size: int
    memory: str


class Alive(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The heartbeat of a rank, idle or not, from `Ready` on.

    Attributes:
        rank: whose.
        silence_s: so much longer than the time-out its next beat may take, for a call that it has announced.
    """

    rank: int
    silence_s: float


class Outputs(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a step gave.

    Attributes:
        rank: whose; the data-parallel one, as everywhere where it is about requests.
        received: `Add`s and `Abort`s that this rank has handled since it started.
        outputs: of any of its requests.
        statistics: after the step.
    """

    rank: int
    received: int
    outputs: Sequence[RequestOutput]
    statistics: EngineStatistics


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that cannot be served; `kind`, `text` and `param` as for `make_error`."""

    rank: int
    request_id: str
    kind: str
    text: str
    param: str | None = None


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A rank ends on an error.

    Attributes:
        rank: which.
        kind: of the error, as for `make_error`.
        name: of its class.
        text: what it says.
        traceback: where it came from; empty where the process died without a word.
        echo: it only felt another rank fail.
    """

    rank: int
    kind: str
    name: str
    text: str
    traceback: str
    echo: bool


class ProfileWritten(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to `StopProfile`; `error` says why there is no file."""

    rank: int
    path: str
    error: str | None


class NodeAlive(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A node other than the client's is there, with all its engines."""

    node_rank: int


ToEngine: TypeAlias = Add | Unreadable | Abort | Wake | StartProfile | StopProfile | Shutdown
FromEngine: TypeAlias = Ready | Alive | Outputs | Refused | Failed | ProfileWritten | NodeAlive


class Turn(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a leader takes in before a step, or while it pauses.

    Attributes:
        number: 0, 1, 2, ...
        told: a checksum of all that the leader's steps have given until now.
        messages: what it handles now, seeds and all.
    """

    number: int
    told: int
    messages: Sequence[ToEngine]


class _Named(msgspec.Struct):
    """What every request has, whatever else is in it."""

    request_id: str


def _pack(value: object) -> bytes:
    if isinstance(value, TokenIds):
        return value.packed
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _unpack(kind: type, value: Any) -> TokenIds:
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds.unpack(value)
    raise TypeError(f"a {type(value).__name__} is no {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unpack)
_loose_add = msgspec.msgpack.Decoder(tuple[Literal["Add"], _Named, int])
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_turn = msgspec.msgpack.Decoder(Turn, dec_hook=_unpack)


def encode(message: ToEngine | FromEngine | Turn) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message to an engine.

    Raises:
        msgspec.ValidationError: it is none.
    """
    try:
        return _to_engine.decode(data)
    except msgspec.ValidationError as error:
        try:
            _, named, epoch = _loose_add.decode(data)
        except msgspec.ValidationError:
            raise error from None
        return Unreadable(named.request_id, epoch, str(error))


def decode_from_engine(data: bytes) -> FromEngine:
    """A message from an engine or a node; errors as `decode_to_engine`."""
    return _from_engine.decode(data)


def decode_turn(data: bytes) -> Turn:
    """A turn from a leader; errors as `decode_to_engine`."""
    return _turn.decode(data)


_ERRORS: dict[str, type[UBatchError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CheckpointFileMissing,
        ConfigError,
        KVCacheExhausted,
        RequestError,
        UBatchError,
    )
}


def error_kind(error: BaseException) -> str:
    """The name of the nearest class of `error` that can be made again from its text; its own if there is none."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), type(error).__name__)


def make_error(kind: str, text: str, param: str | None = None) -> UBatchError | None:
    """The error of a kind that another process named; None for one that is not this project's. A `RequestError` has
    the parameter that is wrong."""
    made = _ERRORS.get(kind)
    if made is RequestError:
        return RequestError(text, param=param)
    return None if made is None else made(text)
