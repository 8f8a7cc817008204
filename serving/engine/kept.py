"""What a rank leaves behind for the process that takes its place, and for whoever looks why it ended: memory that
outlives processes.

A `SharedMemory` has no name in any file system; where the system is not Linux, it is a temporary file without one. It
lives as long as one process has it open, so a killed server leaves nothing behind. The process that starts the ranks
makes it and keeps it; ranks get it as an argument.

*The record of steps* (`KeptOfRank.steps`) says which requests are in the steps that run now. A rank writes it at each
step. Whoever has started the rank reads it once the rank has failed in any way: a process that is killed, crashes or
hangs cannot say what it was doing.

    begun, ended    steps so far; those between the two run now: at most two, in the overlapped loop
    slot 0, slot 1  requests of the even and of the odd steps: length, checksum, MessagePack
    aside, slot 2   whether the rank works on requests beside these steps, and on which
    held, slot 3    whether a thread makes grammars, and of which requests

    begin           write the slot of step `begun`, which no step that runs uses, if it has others; then count `begun`
    end             count `ended`
    begin_aside     reset `aside`, write slot 2, set `aside`: a request is taken in, drafts are made for those that run,
                    or the scheduler has failed for one of its own
    end_aside       reset `aside`
    hold            reset `held`, write slot 3, set `held` if there are any

A process that dies between any two of these writes leaves a slot that is whole. Only while the rank still runs may the
reader see one half written; it notices by the checksum or by the counts, and reads again.
"""

import logging
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any

import msgspec

from serving.logs import log_event

_logger = logging.getLogger(__name__)

_BEGUN, _ENDED, _ASIDE, _HELD, _LENGTH, _CHECKSUM = 0, 1, 2, 3, 4, 8
"""Places in the header, in words of eight bytes; of length and checksum there is one for each slot."""
_STEPS = 2
"""Most steps that run at once."""
_OF_ASIDE, _OF_HELD, _SLOTS = _STEPS, _STEPS + 1, _STEPS + 2
_HEADER = 128
_SLOT = 4 << 20
"""Bytes of a slot. Only those written take memory. It suffices for 1,024 ids of 4,000 characters each."""
_TRIES, _AGAIN_S = 20, 0.001


class SharedMemory:
    """A file in memory. It can be passed to a process that is started; there it is the same memory."""

    def __init__(self, name: str) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)

    @property
    def size(self) -> int:
        """Bytes; 0 at first."""
        return os.fstat(self.fd).st_size

    def map(self, size: int | None = None) -> mmap.mmap:
        """The memory, to read and write.

        Args:
            size: make it as large as this before.
        """
        if size is not None:
            os.ftruncate(self.fd, size)
        return mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Close it here."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _received(fd: Any) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory.fd = fd.detach()
    return memory


@dataclass(frozen=True)
class KeptOfRank:
    """What is kept of one rank, from one of its processes to the next.

    Attributes:
        weights: prepared weights, and what was measured for them.
        steps: which requests are in the steps that run.
    """

    weights: SharedMemory = field(default_factory=lambda: SharedMemory("ubatch-weights"))
    steps: SharedMemory = field(default_factory=lambda: SharedMemory("ubatch-steps"))

    def close(self) -> None:
        """Close the memory here."""
        self.weights.close()
        self.steps.close()


@dataclass(frozen=True)
class InStep:
    """What a rank is doing.

    Attributes:
        inside: it runs steps, perhaps without requests of its own, as ranks do that share experts; or it works on
            requests beside them.
        requests: ids of these requests.
    """

    inside: bool = False
    requests: tuple[str, ...] = ()


class StepRecord:
    """Writes the record of a rank. At first no step runs."""

    def __init__(self, memory: SharedMemory) -> None:
        self._bytes = memory.map(_HEADER + _SLOTS * _SLOT)
        self._words = memoryview(self._bytes).cast("Q")
        self._words[_BEGUN] = self._words[_ENDED] = self._words[_ASIDE] = self._words[_HELD] = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._written: list[Sequence[str] | None] = [None] * _STEPS

    def begin(self, requests: Sequence[str]) -> None:
        """A step is about to be launched. Of a step whose ids are too long for a slot, none is recorded.

        Args:
            requests: its requests' ids; a list that does not change any more.
        """
        step = self._words[_BEGUN]
        slot = step % _STEPS
        if requests != self._written[slot]:  # decode steps have the same ones, mostly
            self._write(slot, requests)
            self._written[slot] = requests
        self._words[_BEGUN] = step + 1

    def end(self) -> None:
        """The oldest step that runs is processed."""
        self._words[_ENDED] += 1

    def begin_aside(self, requests: Sequence[str]) -> None:
        """Work on requests begins beside the steps that run."""
        self._words[_ASIDE] = 0
        self._write(_OF_ASIDE, requests)
        self._words[_ASIDE] = 1

    def end_aside(self) -> None:
        """This work has ended, well or by an error that is the request's alone."""
        self._words[_ASIDE] = 0

    def hold(self, requests: Sequence[str]) -> None:
        """The requests whose grammars are made in a thread, from now on."""
        self._words[_HELD] = 0
        self._write(_OF_HELD, requests)
        self._words[_HELD] = bool(requests)

    def _write(self, slot: int, requests: Sequence[str]) -> None:
        words, encoded = self._words, self._encode(requests)
        if len(encoded) > _SLOT:
            encoded = self._encode(())
        start = _HEADER + slot * _SLOT
        self._bytes[start : start + len(encoded)] = encoded
        words[_LENGTH + slot], words[_CHECKSUM + slot] = len(encoded), zlib.crc32(encoded)


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
        begun, ended, aside, held = before = tuple(words[_BEGUN : _HELD + 1])
        if not 0 <= begun - ended <= _STEPS:
            return None
        requests: dict[str, None] = {}
        beside = [slot for slot, used in ((_OF_ASIDE, aside), (_OF_HELD, held)) if used]
        for slot in [*(step % _STEPS for step in range(ended, begun)), *beside]:
            start, length = _HEADER + slot * _SLOT, words[_LENGTH + slot]
            encoded = bytes(data[start : start + min(length, _SLOT)])
            if zlib.crc32(encoded) != words[_CHECKSUM + slot]:
                return None
            requests.update(dict.fromkeys(msgspec.msgpack.decode(encoded, type=list[str])))
        if before != tuple(words[_BEGUN : _HELD + 1]):
            return None
    return InStep(begun > ended or bool(beside), tuple(requests))
