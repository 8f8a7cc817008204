"""Which requests are in the steps that run now, in memory that outlives the rank's process (`KeptOfRank.steps`).

A rank writes it at each step. Whoever has started the rank reads it once the rank has failed in any way: a process that
is killed, crashes or hangs cannot say what it was doing.

    begun, ended    steps so far; those between the two run now: at most two, in the overlapped loop
    slot 0, slot 1  requests of the even and of the odd steps: length, checksum, MessagePack

    begin           write the slot of step `begun`, which no step that runs uses; then count `begun`
    end             count `ended`

A process that dies between any two of these writes leaves a slot that is whole. Only while the rank still runs may the
reader see one half written; it notices by the checksum or by the counts, and reads again.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from serving.engine.kept import SharedMemory
from serving.logs import log_event

_logger = logging.getLogger(__name__)

_BEGUN, _ENDED, _LENGTH, _CHECKSUM = 0, 1, 2, 4
"""Places in the header, in words of eight bytes; of length and checksum there are two each."""
_SLOTS = 2
_HEADER = 64
_SLOT = 4 << 20
"""Bytes of a slot. Only those written take memory. It suffices for 1,024 ids of 4,000 characters each."""
_TRIES, _AGAIN_S = 20, 0.001


@dataclass(frozen=True)
class InStep:
    """What a rank is doing.

    Attributes:
        inside: it runs steps, perhaps without requests of its own, as ranks do that share experts.
        requests: ids of the requests in these steps.
    """

    inside: bool = False
    requests: tuple[str, ...] = ()


class StepRecord:
    """Writes the record of a rank. At first no step runs."""

    def __init__(self, memory: SharedMemory) -> None:
        self._bytes = memory.map(_HEADER + _SLOTS * _SLOT)
        self._words = memoryview(self._bytes).cast("Q")
        self._words[_BEGUN] = self._words[_ENDED] = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def begin(self, requests: Sequence[str]) -> None:
        """A step is about to be launched. Of a step whose ids are too long for a slot, none is recorded."""
        words, step = self._words, self._words[_BEGUN]
        slot = step % _SLOTS
        encoded = self._encode(requests)
        if len(encoded) > _SLOT:
            encoded = self._encode(())
        start = _HEADER + slot * _SLOT
        self._bytes[start : start + len(encoded)] = encoded
        words[_LENGTH + slot], words[_CHECKSUM + slot] = len(encoded), zlib.crc32(encoded)
        words[_BEGUN] = step + 1

    def end(self) -> None:
        """The oldest step that runs is processed."""
        self._words[_ENDED] += 1


def read_steps(memory: SharedMemory) -> InStep:
    """What the rank of this record was doing when its process ended, or does now. If the record is damaged: a step
    whose requests are not known."""
    for _ in range(_TRIES):
        found = _read(memory)
        if found is not None:
            return found
        time.sleep(_AGAIN_S)  # the rank still runs
    log_event(_logger, "the record of a rank's steps is damaged: it is not known which ran", level=logging.WARNING)
    return InStep(inside=True)


def clear_steps(memory: SharedMemory) -> None:
    """Forget the steps of an earlier process, before a new one is started."""
    if memory.size:
        with memory.map() as data:
            data[:_HEADER] = bytes(_HEADER)


def _read(memory: SharedMemory) -> InStep | None:
    """The record; None if it was being written meanwhile."""
    if not memory.size:  # the rank has not got so far
        return InStep()
    with memory.map() as data, memoryview(data) as view, view.cast("Q") as words:
        begun, ended = words[_BEGUN], words[_ENDED]
        if not 0 <= begun - ended <= _SLOTS:
            return None
        requests: dict[str, None] = {}
        for step in range(ended, begun):
            slot = step % _SLOTS
            start, length = _HEADER + slot * _SLOT, words[_LENGTH + slot]
            encoded = bytes(data[start : start + min(length, _SLOT)])
            if zlib.crc32(encoded) != words[_CHECKSUM + slot]:
                return None
            requests.update(dict.fromkeys(msgspec.msgpack.decode(encoded, type=list[str])))
        if (begun, ended) != (words[_BEGUN], words[_ENDED]):
            return None
    return InStep(begun > ended, tuple(requests))
