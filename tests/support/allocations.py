"""Which operations allocate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountAllocations(TorchDispatchMode):
    """Names the operations that return a tensor whose memory no argument of theirs has: the ones that allocate.

    That counts what an operation returns on the arguments' device. Room that a kernel takes for itself and gives back
    before it returns is not seen; none of the operations used here needs any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocating: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = memory_of((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if memory_of(result) - given:
            self.allocating.append(str(func))
        return result


def memory_of(arguments: Any) -> set[int]:
    """Addresses of the memory that the tensors and storages in there have."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    storages = [x.untyped_storage() if isinstance(x, torch.Tensor) else x for x in leaves]
    return {x.data_ptr() for x in storages if isinstance(x, torch.UntypedStorage) and x.nbytes()}
