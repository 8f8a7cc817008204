"""What a rank's process has prepared at its start, in memory that outlives it: its next process need not do it again.

On a CPU these are the model and its draft network with all of their tensors, as they are after loading: sharded,
dequantised, packed for the kernels. On every device it is what was measured: choices of kernels, blocks of the KV
cache. Weights on a GPU are not kept, and neither are oneDNN's packed ones, whose layout is opaque.

    0          what it was made for, as a digest; then what was measured, an entry behind the other
    64 KiB     where the index lies, and its checksum; written last, so an unfinished one is not used
    68 KiB     the bytes of all tensors, then the index: the objects, pickled, with their tensors by number

The process that prepares the memory uses it as its next ones do, so weights are there once: its tensors are views. They
are private, so that what a process writes to them stays its own (copy on write).
"""

import ctypes
import hashlib
import io
import json
import logging
import mmap
import os
import pickle
import platform
import struct
import zlib
from collections import UserDict
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_MEASURED_BYTES = 1 << 16
_FIRST_BYTE = _MEASURED_BYTES + (1 << 12)
_ALIGNMENT = 1 << 6
_ENTRY = struct.Struct("<II")  # length, checksum
_INDEX = struct.Struct("<QQI")  # where, length, checksum


class CannotKeep(Exception):
    """Some object cannot be kept; the message says which."""


class KeptStart:
    """What earlier processes of a rank have left, and what this one leaves.

    Args:
        descriptor: of the memory, a file in memory; it stays open.
        made_for: all that the content depends on, see `describe_files`. What was made for anything else is dropped.

    Attributes:
        measured: what was measured, by name; what is added is kept.
        attached: whether the model is an earlier process's.
    """

    def __init__(self, descriptor: int, made_for: str) -> None:
        self._memory = descriptor
        self.attached = False
        versions = f"{torch.__version__} {platform.python_version()} {torch.backends.cpu.get_cpu_capability()}"
        digest = hashlib.sha256(f"{versions} {made_for}".encode()).digest()
        if os.pread(descriptor, len(digest), 0) != digest:
            if os.fstat(descriptor).st_size:
                _logger.info("what an earlier process has kept was made for other files or settings: it is dropped")
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, _FIRST_BYTE)
            os.pwrite(descriptor, digest, 0)
        self.measured: MutableMapping[str, Any] = _Measured(descriptor, len(digest))

    def attach(self, given: Mapping[str, object]) -> Any:
        """The objects that `keep` was called with, in an earlier process; None if there are none.

        Args:
            given: objects of this process in place of those that had these names.
        """
        where, length, checksum = _INDEX.unpack(os.pread(self._memory, _INDEX.size, _MEASURED_BYTES))
        index = os.pread(self._memory, length, where)
        if not length or zlib.crc32(index) != checksum:
            return None
        self.attached = True
        _logger.info("the model is the one that this rank's earlier process has prepared")
        return self._unpickle(index, given)

    def keep(self, objects: Any, given: Mapping[str, object]) -> Any:
        """Move objects into the memory; returns them as `attach` will. Those passed in lose their tensors.

        Objects that cannot be kept are returned as they are; the log says why.

        Args:
            given: objects that are not kept, by name.
        """
        pickler = _Pickler(given)
        try:
            pickled = pickler.pickled(objects)
        except CannotKeep as error:
            _logger.info("the next process of this rank will load the model again: %s", error)
            return objects
        os.pwrite(self._memory, bytes(_INDEX.size), _MEASURED_BYTES)
        os.ftruncate(self._memory, _FIRST_BYTE)
        places = _places(each.nbytes() for each in pickler.storages)
        for number, place in enumerate(places):
            _write(self._memory, pickler.let_go(number), place.start)
        end = places[-1].start + places[-1].nbytes if places else _FIRST_BYTE
        index = pickle.dumps((places, pickler.described, pickled))
        os.pwrite(self._memory, index, end)
        os.pwrite(self._memory, _INDEX.pack(end, len(index), zlib.crc32(index)), _MEASURED_BYTES)
        return self._unpickle(index, given)

    def _unpickle(self, index: bytes, given: Mapping[str, object]) -> Any:
        places, described, pickled = pickle.loads(index)
        memory = mmap.mmap(self._memory, os.fstat(self._memory).st_size, access=mmap.ACCESS_COPY)
        storages = [_view(memory, place) for place in places]
        return _Unpickler(pickled, [each.made_in(storages) for each in described], given).load()


def describe_files(*folders: Path | None) -> str:
    """Names, sizes and times of all files in folders: text that changes when a file does."""
    files = sorted(file for folder in folders if folder is not None for file in folder.iterdir() if file.is_file())
    facts = [(str(file), file.stat()) for file in files]
    return json.dumps([(name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in facts])


class _Measured(UserDict[str, Any]):
    """Entries of JSON in a file in memory; those that are added are written at once."""

    def __init__(self, memory: int, start: int) -> None:
        super().__init__()
        self._memory, self._end = memory, start
        text = os.pread(memory, _MEASURED_BYTES, 0)
        while self._end + _ENTRY.size <= len(text):
            length, checksum = _ENTRY.unpack_from(text, self._end)
            entry = text[self._end + _ENTRY.size :][:length]
            if not length or zlib.crc32(entry) != checksum:  # the end, or its process was killed meanwhile
                return
            self.data.update([json.loads(entry)])
            self._end += _ENTRY.size + length

    def __setitem__(self, name: str, value: Any) -> None:
        entry = json.dumps((name, value)).encode()
        entry = _ENTRY.pack(len(entry), zlib.crc32(entry)) + entry
        super().__setitem__(name, value)
        if self._end + len(entry) <= _MEASURED_BYTES:
            os.pwrite(self._memory, entry, self._end)
            self._end += len(entry)

    def __delitem__(self, name: str) -> None:
        raise TypeError("what was measured stays.")


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where the bytes of a storage are in the memory."""

    start: int
    nbytes: int


def _places(sizes: Iterable[int]) -> list[_Place]:
    places, end = [], _FIRST_BYTE
    for size in sizes:
        places.append(_Place(end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def _write(memory: int, storage: torch.UntypedStorage, start: int) -> None:
    left = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    while left:
        written = os.pwrite(memory, left, start)
        left, start = left[written:], start + written


def _view(memory: mmap.mmap, place: _Place) -> torch.UntypedStorage:
    if not place.nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=place.start, count=place.nbytes).untyped_storage()


class _Described(NamedTuple):
    """A tensor: its storage, by number, and where it lies there."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_parameter: bool

    def made_in(self, storages: list[torch.UntypedStorage]) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storages[self.storage], self.offset, self.shape, self.strides)
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor


class _Pickler(pickle.Pickler):
    """Pickles objects with their tensors, and the given ones, by reference.

    Attributes:
        storages: those of the tensors, each once.
        described: the tensors, each once.
    """

    def __init__(self, given: Mapping[str, object]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._names = {id(each): name for name, each in given.items() if each is not None}
        self._tensors: dict[int, tuple[int, Tensor]] = {}
        self._storage_numbers: dict[int, int] = {}
        self.storages: list[torch.UntypedStorage] = []
        self.described: list[_Described] = []

    def pickled(self, objects: Any) -> bytes:
        """The objects.

        Raises:
            CannotKeep: one cannot be pickled, or is a tensor of another kind.
        """
        try:
            self.dump(objects)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise CannotKeep(str(error)) from error
        return self._file.getvalue()

    def persistent_id(self, obj: Any) -> tuple[str, str | int] | None:
        """See `pickle`."""
        if id(obj) in self._names:
            return "given", self._names[id(obj)]
        if isinstance(obj, Tensor):
            if id(obj) not in self._tensors:
                self._tensors[id(obj)] = len(self._tensors), obj
                self.described.append(self._describe(obj))
            return "tensor", self._tensors[id(obj)][0]
        return None

    def _describe(self, tensor: Tensor) -> _Described:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CannotKeep(f"it has a tensor that is {tensor.layout}, on {tensor.device}.")
        if tensor.requires_grad:
            raise CannotKeep("it has a tensor that requires gradients.")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CannotKeep(f"it has a {type(tensor).__name__}.")
        storage = tensor.untyped_storage()
        number = self._storage_numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        offset, is_parameter = int(tensor.storage_offset()), isinstance(tensor, nn.Parameter)
        return _Described(number, tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), is_parameter)

    def let_go(self, number: int) -> torch.UntypedStorage:
        """Take a storage from the tensors that are its views: its memory is free when the caller has dropped it."""
        for place, tensor in self._tensors.values():
            if self.described[place].storage == number:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
        storage, self.storages[number] = self.storages[number], torch.UntypedStorage(0)
        return storage


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[Tensor], given: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._of: Mapping[str, Any] = {"tensor": tensors, "given": given}

    def persistent_load(self, reference: Any) -> Any:
        """See `pickle`."""
        kind, which = reference
        return self._of[kind][which]
