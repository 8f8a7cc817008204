"""A snapshot of what a call may change, of the module or of its arguments: one comparison, and one way back.

    what was found (`walk`)         a change is noticed by                        it is put back
    attributes, items, contents     another object, or another value              from a shallow copy
    small tensor                    version counter; of buffers also contents     from a copy, without a graph
    large tensor                    version counter; in a proof also contents     nowhere: `restore` names it

The garbage collector lists what all containers hold in one call, so comparing costs little. Writes through `.data`,
numpy or a foreign kernel move no version counter, and inference tensors have none: of those, only small buffers and
small inference tensors are compared by contents, up to a limit.
"""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ubatch.calls.containers import PLAIN
from ubatch.wrapping.effects.walk import SMALL_BYTES, Walk

_BLOCK = 1024
_MOST_COMPARED = 16
"""Most tensors that are compared by contents in every call."""
_version = attrgetter("_version")
_Calls = Iterable[tuple[Sequence[Any], Mapping[str, Any]]]


class State:
    """A snapshot. Of tensors, it is renewed by `mark`.

    Args:
        found: what there is.
        module: whether it belongs to a module, else to a call.
        thorough: compare the contents of all tensors, and their gradients.
        parts: tensors that lanes are given, which must not get attributes.

    Attributes:
        unreadable: see `Walk`.
        has_scratch: whether code of the module may change something between two points that lanes share.
    """

    def __init__(self, found: Walk, *, module: bool, thorough: bool = False, parts: Sequence[Tensor] = ()) -> None:
        self._found = found
        self.unreadable, self.has_scratch = found.unreadable, bool(found.scratch)
        self._given = [] if module else [*found.tensors.values(), *parts]
        self._note_items()
        readable = {path: each for path, each in found.tensors.items() if not is_lazy(each)}
        self._small = {path: each for path, each in readable.items() if _is_small(each, module=module)}
        self._versioned = {path: each for path, each in readable.items() if not each.is_inference()}
        self._compared = _compared(self._small, module=module)
        self._sums = {path: (_block_sums(each), _grad_of(each)) for path, each in readable.items() if thorough}
        self._versions: list[int] | None = None
        self._contents: list[bytes] = []
        self._copies: dict[str, tuple[int, bytes | Tensor]] = {}
        self.mark()

    def _note_items(self) -> None:
        found = self._found
        self._alive = gc.get_referents(*found.holders), gc.get_referents(*found.scratch)  # so that identities stay
        self._held, self._scratch = self._holding(), identities(self._alive[1])

    @classmethod
    def of_module(cls, model: nn.Module, *, thorough: bool = False) -> State:
        """The state of a module and everything that it holds."""
        found = Walk(thorough=thorough)
        found.visit("", model)
        return cls(found, module=True, thorough=thorough)

    @classmethod
    def of_call(cls, named: Iterable[tuple[str, Any]], lanes: _Calls = (), *, thorough: bool = False) -> State:
        """The state of a call's arguments, by name; and of the containers that were made anew for `lanes`."""
        found = Walk(thorough=thorough, caches=False)
        found.visit_arguments(named)
        own = dict(found.tensors)
        for lane, (args, kwargs) in enumerate(lanes):
            places = (*enumerate(args), *kwargs.items())
            found.visit_arguments([(f"lane {lane}'s {place}", value) for place, value in places])
        parts = [tensor for path, tensor in found.tensors.items() if path not in own]
        found.tensors = own  # the lanes' are parts of these
        return cls(found, module=False, thorough=thorough, parts=parts)

    @property
    def hooks(self) -> list[Any]:
        """All hooks of the modules now."""
        return gc.get_referents(*self._found.hooks)

    def mark(self) -> bool:
        """Look for writes to tensors from now on; copies of small ones are renewed where they have changed. Returns
        whether one that is compared by its contents had changed since the last time."""
        versions, contents = self._tensors_now()
        if versions == self._versions and contents == self._contents:
            return False
        rewritten = self._versions is not None and contents != self._contents
        self._versions, self._contents = versions, contents
        for path, tensor in self._small.items():
            version = -1 if tensor.is_inference() else tensor._version
            if self._copies.get(path, (None,))[0] != version or path in self._compared:
                on_cpu = tensor.device.type == "cpu"
                self._copies[path] = version, _bytes_of(tensor) if on_cpu else tensor.detach().clone()
        return rewritten

    def moved(self) -> bool:
        """Whether attributes or items may have changed since the snapshot. Cheap; `changed_items` knows which."""
        try:
            return self._holding() != self._held or any(each.take() != each.was for each in self._found.read)
        except Exception:  # a value cannot be read any more
            return True

    def renew(self) -> bool:
        """Take what is there now for what was; False if there may be more in it than one can see, so that it needs
        another walk."""
        taken = [(kept, kept.take()) for kept in self._found.kept]
        others = [value for kept, now in taken for value in _others(kept.was, now)]
        plain = (
            all(isinstance(each, PLAIN) for each in (value if type(value) is tuple else [value])) for value in others
        )
        if not all(plain):
            return False
        for kept, now in taken:
            kept.was = now
        self._note_items()
        return True

    def scratch_moved(self) -> bool:
        """The same of what code of the module may change between two points."""
        return identities(gc.get_referents(*self._found.scratch)) != self._scratch

    def _holding(self) -> tuple[object, ...]:
        """What everything holds, by identity, and the keys and numbers of items."""
        found, given = self._found, self._given
        return (
            identities(gc.get_referents(*found.holders)),
            [*itertools.chain.from_iterable(found.keyed)],
            [*map(len, found.counted)],
            [(each.data_ptr(), each.requires_grad, len(each.__dict__)) for each in given if type(each) is Tensor],
        )

    def _tensors_now(self) -> tuple[list[int], list[bytes]]:
        return [*map(_version, self._versioned.values())], [*map(_bytes_of, self._compared.values())]

    def changes(self) -> list[str]:
        """Paths of what has changed since the snapshot, and of tensors that were written to since `mark`."""
        moved = bool(self._sums) or self.moved()
        if not moved and self._tensors_now() == (self._versions, self._contents):
            return []
        changed = [*(self.changed_items() if moved else ()), *self.written_tensors()]
        if moved and not changed and not self._sums:
            self.renew()  # equal new objects: the next call need not look so closely
        return changed

    def changed_items(self) -> dict[str, Any]:
        """Paths of attributes and items that have changed since the snapshot, and what is there now."""
        changed = {path: value for kept in self._found.kept for path, value in kept.changed().items()}
        if not changed and self._holding()[3] != self._held[3]:
            changed = dict.fromkeys(self._found.tensors)
        return changed

    def written_tensors(self) -> list[str]:
        """Paths of tensors that were written to since `mark`."""
        versions, contents = self._tensors_now()
        moved = [*map(ne, versions, self._versions or ()), *map(ne, contents, self._contents)]
        written = [*itertools.compress([*self._versioned, *self._compared], moved)]
        for path, (sums, grad) in self._sums.items():
            tensor = self._found.tensors[path]
            now = _block_sums(tensor)
            if now is not sums and (now is None or sums is None or not torch.equal(now, sums)):
                written.append(path)
            if _grad_of(tensor) is not grad:
                written.append(f"{path}.grad")
        return [*dict.fromkeys(written)]

    def restore(self) -> list[str]:
        """Put back everything of which there is a copy. Returns the paths of what has changed and has none."""
        lost = []
        for path in self.written_tensors():
            tensor, copy = self._found.tensors[path], self._copies.get(path, (0, None))[1]
            if copy is None or tensor.grad_fn is not None or not _write(tensor, copy):
                lost.append(path)
        for kept in self._found.kept:
            if kept.put is not None and kept.changed():
                with suppress(Exception):  # an object of a user's class may refuse
                    kept.put(kept.was)
                    continue
            lost += kept.changed()
        return [path for path in lost if path not in self._found.tensors or self._differs(path)]

    def _differs(self, path: str) -> bool:
        """Whether a tensor is not as its copy: a view is put back with its base."""
        copy, tensor = self._copies.get(path, (0, None))[1], self._found.tensors[path]
        return not isinstance(copy, bytes) or tensor.grad_fn is not None or _bytes_of(tensor) != copy


def _write(tensor: Tensor, copy: bytes | Tensor) -> bool:
    """Write a copy back; False if the tensor cannot be written to."""
    try:
        if isinstance(copy, bytes):
            copy = torch.frombuffer(bytearray(copy), dtype=tensor.dtype).view(tensor.shape)
        with torch.inference_mode():  # inference mode allows writes to any tensor
            tensor.copy_(copy)
    except RuntimeError:  # its entries share memory, or it has another size now
        return False
    return True


def _list_identities(items: list[Any]) -> bytes:
    """The identities of a list's items, as they lie in its memory."""
    if not items:
        return b""
    start = ctypes.c_void_p.from_address(id(items) + object.__basicsize__ + _WORD).value
    return ctypes.string_at(start or 0, len(items) * _WORD)


def _any_identities(items: list[Any]) -> bytes:
    return array.array("Q", map(id, items)).tobytes()


_WORD = ctypes.sizeof(ctypes.c_void_p)
_PROBE: list[Any] = [None, "probe", 1.5]
_READ = sys.implementation.name == "cpython" and _list_identities(_PROBE) == _any_identities(_PROBE)
identities = _list_identities if _READ else _any_identities
"""The identities of a list's items; reading them from its memory, where that is known to work, is ten times faster."""


def _others(was: Any, now: Any) -> Iterable[Any]:
    """The items of `now` that are other objects than those of `was`."""
    if isinstance(now, dict):
        return [value for key, value in now.items() if value is not was.get(key, now)]
    if isinstance(now, list):
        return [one for one, other in itertools.zip_longest(now, was) if one is not other]
    return now - was if isinstance(now, set) else ()


def _is_small(tensor: Tensor, *, module: bool) -> bool:
    """Whether a copy of a tensor is kept: where reading it is cheap."""
    if not _is_readable(tensor) or not 0 < tensor.nbytes <= SMALL_BYTES:
        return False
    gathered = not isinstance(tensor, nn.Parameter) or tensor.untyped_storage().nbytes() > 0
    return gathered and (tensor.device.type == "cpu" or (module and not isinstance(tensor, nn.Parameter)))


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has plain bytes: not of a subclass, and neither a meta, quantised nor sparse tensor."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _compared(small: Mapping[str, Tensor], *, module: bool) -> dict[str, Tensor]:
    """Small tensors without a version counter, and small buffers, up to a limit in all. Reading a GPU's would wait."""
    found: dict[str, Tensor] = {}
    room = SMALL_BYTES
    for path, tensor in small.items():
        wanted = tensor.is_inference() or (module and not isinstance(tensor, nn.Parameter))
        if wanted and tensor.device.type == "cpu" and tensor.nbytes <= room and len(found) < _MOST_COMPARED:
            found[path] = tensor
            room -= tensor.nbytes
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    start = tensor.data_ptr()
    return ctypes.string_at(start, tensor.nbytes) if start else b""


def _grad_of(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


@torch.no_grad()
def _block_sums(tensor: Tensor) -> Tensor | None:
    """Sums over blocks of a tensor's bytes; None if it has none that can be read, as a shard that is not gathered."""
    if not _is_readable(tensor) or not tensor.numel() or not tensor.untyped_storage().nbytes():
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    blocks = words.numel() // _BLOCK * _BLOCK
    rest = words[blocks:].sum().view(1), flat[whole:].sum(dtype=torch.int64).view(1)
    return torch.cat([words[:blocks].view(-1, _BLOCK).sum(1), *rest])
