"""Records the kernels in C that a function calls, to call them again without the Python between them.

As a CUDA graph does for a GPU: a decode step calls some ten small kernels a layer, and Python takes longer to prepare a
call than the kernel takes to run. A recording keeps every call with its arguments, and all memory that was allocated
meanwhile, so addresses stay valid. It is refused if torch computed anything itself, which would be missing:

    recording = Recording()
    with recording:
        out = function(x)       results are as always
    recording.refused           None, or the operator that torch ran; then nothing is kept
    recording.calls             call each again: `out` is computed anew from what `x` holds then
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ubatch.dbo import dbo_yield
from ubatch.lanes.context import current_lane

_aten = torch.ops.aten
_READ_BY_HOST = {_aten.lift, _aten.lift_fresh, _aten.resolve_conj, _aten.resolve_neg}
"""Views by what they return; but these begin `torch.tensor(...)` and `tolist()`, whose rest is not seen."""
_ALLOCATES = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}


class Rebinds(Protocol):
    """A step's plan that can take the place of the one with which calls were recorded."""

    @property
    def repeats(self) -> int | None:
        """Number of rows if this step's calls may be recorded, and made in place of another one's; else None."""

    def rebound(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A recorded call's arguments, for this step. The step must have as many rows as the recorded one."""


@dataclass
class Call:
    """A kernel's call.

    Attributes:
        function: the library's function.
        arguments: numbers and addresses.
        layer: for a call whose arguments change from step to step: the layer to ask the step's plan for.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    layer: int | None = None


class Recording(TorchDispatchMode):
    """What was called within the `with` block, by this thread. It does not nest.

    Args:
        most_bytes: it is refused if it had to keep more.

    Attributes:
        calls: in order.
        kept: the memory that the calls use, by object, with its bytes; together `kept_bytes`.
        refused: why it cannot be used; None if it can.
        computed: the first operator that torch computed; None if there is none.

    Source: CUDA graphs, for kernels on a CPU.
    """

    def __init__(self, most_bytes: int = 1 << 62) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.refused: str | None = None
        self.computed: str | None = None
        self.kept: dict[int, tuple[object, int]] = {}
        self.kept_bytes = 0
        self._most_bytes = most_bytes

    def __enter__(self) -> Recording:
        super().__enter__()  # type: ignore[no-untyped-call]
        this_thread.recording = self
        lane = current_lane()
        if lane is not None:
            lane.at_point = lambda point, layer: self.note(dbo_yield, (point, layer))
        return self

    def __exit__(self, *error: Any) -> None:
        this_thread.recording = None
        lane = current_lane()
        if lane is not None:
            lane.at_point = None
        super().__exit__(*(error or (None,) * 3))  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode. Else torch would import its compiler at the first operator, which takes
        seconds, in the midst of a step."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATES:
            self.keep(result)
        elif func._schema.is_mutable or func.overloadpacket in _READ_BY_HOST or not _only_views(result, (args, kwargs)):
            self.computed = self.computed or str(func)
            self._refuse(f"torch computed {func}")
        return result

    def keep(self, *memory: object) -> None:
        """Keep tensors, or other objects whose addresses kernels get."""
        if self.refused is not None:
            return
        for each in memory:
            if id(each) not in self.kept:
                size = each.untyped_storage().nbytes() if isinstance(each, Tensor) else 0
                self.kept[id(each)] = (each, size)
                self.kept_bytes += size
        if self.kept_bytes > self._most_bytes:
            self._refuse(f"it would keep more than {self._most_bytes >> 20} MiB")

    def note(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Add a call."""
        if self.refused is None:
            self.calls.append(Call(function, arguments))

    def live(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """The result of `function(*inputs)`, which is not recorded: every repetition calls it again, on what its inputs
        hold then. For what cannot be recorded, such as transfers between ranks."""
        self.__exit__()
        try:
            result = function(*inputs).clone()
        finally:
            self.__enter__()
        self.keep(result, *[each for each in inputs if isinstance(each, Tensor)])
        self.note(_call_live, (function, inputs, result))
        return result

    def mark_rebound(self, layer: int) -> None:
        """Mark the last call: its arguments change from step to step; see `Call.layer`."""
        if self.refused is None:
            self.calls[-1].layer = layer

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason
        self.calls.clear()
        self.kept.clear()


def _call_live(function: Callable[..., Tensor], inputs: tuple[Any, ...], result: Tensor) -> None:
    result.copy_(function(*inputs))


def _only_views(result: Any, arguments: Any) -> bool:
    """Whether an operator computed nothing: its results are tensors in the memory of its arguments.

    A schema does not tell: `to` and `reshape` copy where they must.
    """
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    results = tree_leaves(result)
    return bool(results) and all(
        isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in given for leaf in results
    )


class _Thread(threading.local):
    """The recording of the calling thread, or None. Kernels look at it after each call.

    Memory whose address a kernel gets, but which torch did not allocate within the block, such as scratch, must be
    given to `keep`, or live as long as the model.
    """

    recording: Recording | None = None


this_thread = _Thread()
