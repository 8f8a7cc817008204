"""Graphs without a GPU: every torch operation and every interpreted Triton launch of a capture, recorded and replayed.

As close to a CUDA graph as a CPU can come:

    streams are captured, not threads    what all parts put in, in the order of the baton, is one list
    capturing executes nothing           what a capture wrote to memory that was there before is put back at its end,
                                         and what it allocated is poisoned: a replay must compute all of it again
    addresses and scalars are frozen     a replay runs the same operations on the same tensors, in one thread
    the host must not look               reading what the device computes, sizes that depend on data, and tensors made
                                         of the host's numbers are refused, and spoil the capture

Every tensor that a recorded operation touched counts as the device's, and so does what `on_device` was told of; others
may be mirrors on the host, which may be read.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = frozenset(
    {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount"}
)
"""Operations that wait for the device: they return a number, or a shape that depends on data."""
METHODS = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in ("tolist", "numpy", "__array__", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
}
FROM_HOST = {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor", torch.from_numpy: "torch.from_numpy"}
_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_") and not callable(name)]
_thread = threading.local()


class NotPermittedError(RuntimeError):
    """What CUDA would refuse while a stream is captured."""


@dataclass
class _Step:
    """One operation: called again with the same arguments, its results copied to where they were."""

    run: Callable[[], Any]
    results: list[Tensor]

    def __call__(self) -> None:
        again = [leaf for leaf in tree_leaves(self.run()) if isinstance(leaf, Tensor)]
        for result, new in zip(self.results, again, strict=True):
            if _storage(result) != _storage(new):
                result.copy_(new)


@dataclass
class FakeRecording:
    """See `ubatch.streams.graph_protocols.Recording`.

    Attributes:
        steps: what a replay does, in order.
        nbytes: of the storages that the capture made.
        replayed: how often.
    """

    graphs: FakeGraphs
    steps: list[_Step]
    nbytes: int
    released: bool = False
    replayed: int = 0

    def take_turn(self) -> None:
        self.graphs.turns += 1

    def replay(self) -> None:
        assert not self.released, "a graph that was released is replayed"
        assert not hasattr(_thread, "capture"), "a graph is replayed inside a capture"
        self.replayed += 1
        self.graphs.replays += 1
        self.graphs.replay_threads.add(threading.get_ident())
        with torch.inference_mode():  # what was captured in it can be written nowhere else
            for step in self.steps:
                step()

    def release(self) -> None:
        assert not self.released, "released twice"
        self.released = True
        self.steps.clear()
        self.graphs.alive -= 1


class FakeGraphs:
    """A `GraphBackend` for a CPU.

    Attributes:
        replays: of all graphs.
        replay_threads: threads in which they ran.
        turns: how often a replay took its turn.
        captures, aborted: captures that began; those of them that were not ended.
        warm_ups: rehearsals, each of which may be several runs.
        alive: graphs that were not released.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.replays = self.turns = self.captures = self.aborted = self.warm_ups = self.alive = 0
        self.replay_threads: set[int] = set()
        self.touched: set[int] = set()

    def on_device(self, *tensors: Tensor) -> None:
        """These are the device's: reading them on the host is refused from the start."""
        self.touched.update(map(_storage, tensors))

    def another(self) -> FakeGraphs:
        return FakeGraphs(self.device)

    def __reduce__(self) -> Any:
        return FakeGraphs, (self.device,)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        self.warm_ups += 1
        yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[FakeCapture]:
        capture = FakeCapture(self)
        flags = {name: getattr(_python_dispatch, name) for name in _FLAGS}
        try:
            yield capture
        finally:
            capture.close()
            for name, value in flags.items():  # modes of several threads do not nest, and torch keeps these per process
                setattr(_python_dispatch, name, value)


@dataclass(eq=False)
class FakeCapture:
    """See `ubatch.streams.graph_protocols.Capture`."""

    graphs: FakeGraphs
    steps: list[_Step] = field(default_factory=list)
    _begun: bool = False
    _over: bool = False
    _spoilt: str | None = None
    _made: dict[int, Tensor] = field(default_factory=dict)
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _touched: set[int] = field(default_factory=set)

    def begin(self) -> None:
        assert not self._begun, "a capture began twice"
        self._begun = True
        self._touched = set(self.graphs.touched)
        self.graphs.captures += 1
        _patch_triton()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        assert not hasattr(_thread, "capture"), "a thread takes part in two captures"
        _thread.capture = self
        try:
            with _Reads(self), _Operations(self):
                yield
        finally:
            del _thread.capture

    def end(self) -> FakeRecording:
        assert self._begun
        assert not self._over
        if self._spoilt is not None:
            raise NotPermittedError(f"the capture was spoilt before: {self._spoilt}")
        self._over = True
        self._undo()
        self.graphs.alive += 1
        return FakeRecording(
            self.graphs, self.steps, sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())
        )

    def close(self) -> None:
        """Abort, unless it was ended or never begun."""
        if self._begun and not self._over:
            self._over = True
            self.graphs.aborted += 1
            self._undo()
            self.steps.clear()
        self._made.clear()

    # -- for the modes ------------------------------------------------------------------------------------------

    def spoil(self, what: str, why: str) -> NotPermittedError:
        """What to raise: an operation is refused, and the capture with it."""
        self._spoilt = what
        return NotPermittedError(f"operation not permitted when stream is capturing: {what} {why}")

    def is_the_devices(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _storage(value) in self._touched

    def add(self, name: str, run: Callable[[], Any], used: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
        """Run an operation and remember it."""
        if not self._begun or self._over:
            raise AssertionError(f"{name} ran in a part of a capture that had not begun, or was over")
        for tensor in written:
            if (key := _storage(tensor)) not in self._made and key not in self._before:
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()
        value = run()
        results = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        known = {_storage(tensor) for tensor in used}
        for result in results:
            if _storage(result) not in known:
                self._made.setdefault(_storage(result), result)
        self._touched.update(known, map(_storage, results))
        self.steps.append(_Step(run, results))
        return value

    def _undo(self) -> None:
        """As if nothing had run."""
        with torch.inference_mode():
            for tensor, before in self._before.values():
                tensor.copy_(before)
            for tensor in self._made.values():
                _whole(tensor).fill_(0xA5)
        self._before.clear()


class _Operations(TorchDispatchMode):
    """Records what reaches the device."""

    def __init__(self, capture: FakeCapture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        capture, name = self._capture, func.overloadpacket.__name__
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in HOST_READS or has_data_dependent_shape(name, args, kwargs):
            if any(map(capture.is_the_devices, used)):
                raise capture.spoil(str(func), "reads what the device has not computed yet")
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return capture.add(str(func), lambda: _finished(func(*args, **kwargs)), used, used)
        arguments = func._schema.arguments
        named = {**{each.name: value for each, value in zip(arguments, args, strict=False)}, **kwargs}
        changed = [
            named.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write
        ]
        written = [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]
        return capture.add(str(func), lambda: func(*args, **kwargs), used, written)


class _Reads(TorchFunctionMode):
    """Refuses what never reaches a dispatcher: the host looks at memory, or makes tensors of its own numbers."""

    def __init__(self, capture: FakeCapture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            method, source = METHODS.get(func), FROM_HOST.get(func)
        except TypeError:  # unhashable
            method = source = None
        if method is not None and self._capture.is_the_devices(args[0]):
            raise self._capture.spoil(method, "reads what the device has not computed yet")
        if source is not None and not isinstance((args or [None])[0], Tensor):
            raise self._capture.spoil(source, "copies pageable memory of the host")
        return func(*args, **(kwargs or {}))


def run_kernel(name: str, run: Callable[[], Any], used: Sequence[Tensor]) -> None:
    """Run one launch of a library's kernel, which may do what torch may not: read what it computes.

    A capture of this thread records it as one operation, which a replay runs again on the same tensors.

    Args:
        name: for errors.
        run: changes tensors in place.
        used: all tensors that it reads or changes.
    """
    capture: FakeCapture | None = getattr(_thread, "capture", None)
    if capture is None:
        run()
        return
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # what runs is no operation of torch's
        capture.add(name, run, used, used)


def has_data_dependent_shape(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        filled = name.startswith("index_put") and args[2].numel() == 1  # becomes masked_fill
        return bool(masks) and not filled
    if name == "repeat_interleave":
        counts = args[1] if len(args) > 1 else args[0]
        return isinstance(counts, Tensor) and kwargs.get("output_size") is None
    return name == "where" and len(args) == 1


def _finished(value: Any) -> Any:
    """A collective's results, when they are there."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.ScriptObject):
            torch.distributed.Work.unbox(leaf).wait()
    return value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


def _patch_triton() -> None:
    """Let interpreted launches be recorded, in threads that take part in a capture. Once, and for good."""
    if "triton.runtime.interpreter" not in sys.modules:  # whoever launches has done so while warming up
        return
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__
    if hasattr(original, "launches"):
        return

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        capture: FakeCapture | None = getattr(_thread, "capture", None)
        if capture is None:
            original(executor, *args, **kwargs)
            return
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        run_kernel(executor.fn.__name__, lambda: original(executor, *args, **kwargs), used)

    launch.launches = original  # type: ignore[attr-defined]
    GridExecutor.__call__ = launch
