"""One pass over a checkpoint's files: a rank's tensors are read once, in the order of the files.

    want       while the model is built: note a tensor of a file, or a part of it, and its destination in memory
    run        reader threads    mapped file -> pinned buffer, dequantised or converted to the dtype of the destination
               caller            pinned buffer -> destination, an asynchronous copy on the current stream
    once_read  runs an action on several tensors (packing, reordering) as soon as all of them are read

    readers    | read 0 | read 1 | read 2 | ...
    stream              | copy 0 | copy 1 | ...         a buffer is written again when its last copy is done

Destinations are on the device; a direct copy from the mapped file would be one from pageable memory, and make the host
wait. On a CPU there are no buffers and no reader threads: the caller copies from the file to the destination.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_runner.weights.quantization import MXFP4Blocks, ScaledBlocks
from ubatch.streams import Event, NullStreams, StreamBackend, make_streams

PINNED_BYTES = 128 << 20
"""Most bytes of pinned host memory of a pass."""
_BUFFERS = 8
_READERS = 4
"""Files are read this many buffers ahead of the copies; the other buffers are being copied meanwhile."""
_ALIGNMENT = 256

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far, and the total."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor of a file, and its destination.

    Attributes:
        file: the file's name; files are read in the order of their names.
        source: the tensor, or the wanted part of it, in the mapped file: no byte of it is read yet.
        out: the destination, of the same shape.
        then: called when it is read.
    """

    file: str
    source: Tensor | ScaledBlocks | MXFP4Blocks
    out: Tensor
    then: list[Callable[[], None]] = field(default_factory=list)

    def read(self, index: Index, out: Tensor) -> None:
        """Write a part of the source to `out`, in the dtype of `out`."""
        source = self.source[index]
        if isinstance(source, Tensor):
            out.copy_(source)
        else:
            source.read(out)


@dataclass(frozen=True)
class _Piece:
    """A part of a `Wanted` that fits a buffer, its destination, and its byte offset in the buffer."""

    wanted: Wanted
    index: Index
    place: Tensor
    start: int
    last: bool

    def staged(self, buffer: Tensor) -> Tensor:
        place = self.place
        return buffer[self.start : self.start + place.nbytes].view(place.dtype).view(place.shape)


_Buffer = tuple[Tensor, Event]
"""Pinned memory, and the event at the end of the last copy from it."""


@dataclass
class WeightPass:
    """The wanted tensors, and the pass that reads them.

    Args:
        pinned_bytes: most pinned memory at once.
    """

    device: torch.device
    streams: StreamBackend | None = None
    pinned_bytes: int = PINNED_BYTES
    _wanted: list[Wanted] = field(default_factory=list)

    def want(self, wanted: Wanted) -> None:
        """Note a tensor to read."""
        if wanted.out.numel():
            self._wanted.append(wanted)

    @contextmanager
    def once_read(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action` when all tensors wanted in the `with` block are read, in the stream's order."""
        first = len(self._wanted)
        yield
        needed = self._wanted[first:]
        missing = len(needed)

        def one_read() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                action()

        for wanted in needed:
            wanted.then.append(one_read)
        if not needed:
            action()

    @torch.no_grad()
    def run(self, progress: Progress | None = None) -> None:
        """Read all wanted tensors, once. The pass drops its reference to each destination when it is filled."""
        ordered = deque(sorted(self._wanted, key=lambda each: (each.file, each.source.data_ptr())))
        self._wanted.clear()
        total, done = sum(each.out.nbytes for each in ordered), 0

        def placed(piece: _Piece) -> None:
            nonlocal done
            done += piece.place.nbytes
            if progress is not None:
                progress(done, total)
            for told in piece.wanted.then if piece.last else ():
                told()

        streams = make_streams(self.device) if self.streams is None else self.streams
        if isinstance(streams, NullStreams):
            while ordered:
                wanted = ordered.popleft()
                wanted.read((), wanted.out)
                placed(_Piece(wanted, (), wanted.out, 0, last=True))
        else:
            self._by_pinned_memory(ordered, streams, placed)

    def _by_pinned_memory(
        self, ordered: deque[Wanted], streams: StreamBackend, placed: Callable[[_Piece], None]
    ) -> None:
        room = self.pinned_bytes // _BUFFERS
        buffers: list[_Buffer] = []
        reading: deque[tuple[_Buffer, list[_Piece], Future[None]]] = deque()

        def send() -> None:
            (memory, copied), pieces, read = reading.popleft()
            read.result()
            for piece in pieces:
                piece.place.copy_(piece.staged(memory), non_blocking=True)
            copied.record(streams.current())
            for piece in pieces:
                placed(piece)

        with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as readers:
            for number, pieces in enumerate(_batches(ordered, room)):
                if len(buffers) < _BUFFERS:
                    buffers.append((self._pinned(room), streams.new_event()))
                memory, copied = buffers[number % _BUFFERS]
                copied.synchronize()
                reading.append(((memory, copied), pieces, readers.submit(_fill, memory, pieces)))
                if len(reading) > _READERS:
                    send()
            while reading:
                send()
        for _, copied in buffers:  # wait before they are freed
            copied.synchronize()

    @torch.inference_mode(False)  # other threads write to it
    def _pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def _fill(memory: Tensor, pieces: Sequence[_Piece]) -> None:
    """Read the pieces into a buffer, each converted to the dtype of its destination."""
    with torch.no_grad():
        for piece in pieces:
            piece.wanted.read(piece.index, piece.staged(memory))


def _batches(ordered: deque[Wanted], room: int) -> Iterator[list[_Piece]]:
    """Pieces in order, in lists of up to `room` bytes each; removes the tensors from `ordered`."""
    batch: list[_Piece] = []
    start = 0
    while ordered:
        wanted = ordered.popleft()
        indices = list(_indices(tuple(wanted.out.shape), wanted.out.dtype.itemsize, room))
        for index in indices:
            place = wanted.out[index]
            if start + place.nbytes > room:
                yield batch
                batch, start = [], 0
            batch.append(_Piece(wanted, index, place, start, index is indices[-1]))
            start += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
    if batch:
        yield batch


def _indices(shape: tuple[int, ...], itemsize: int, room: int) -> Iterator[Index]:
    """Indices of the pieces of a tensor of `shape` that are at most `room` bytes each."""
    if math.prod(shape) * itemsize <= room:
        yield ()
        return
    rows = room // (math.prod(shape[1:]) * itemsize)
    for start in range(0, shape[0], max(1, rows)):
        if rows:
            yield (slice(start, start + rows),)
        else:
            yield from ((start, *rest) for rest in _indices(shape[1:], itemsize, room))
