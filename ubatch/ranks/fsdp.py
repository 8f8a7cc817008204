"""Lanes with `fully_shard`, where torch gathers weights module by module: the last lane that leaves frees them.

torch gathers a module's weights when a call begins, frees them when it ends, and expects one call at a time. With two
lanes, the first to leave would free the weights while the other still uses them. Instead:

    lane 0    | gather, layer ~~~~~~~ layer |                       leaves: lane 1 is inside, nothing is freed
    lane 1                    | layer ~~~~~~~~~~~ layer, free |     finds them gathered, and frees them

`torch.distributed.fsdp` has no hook for this, so two of its methods are replaced while lanes run. Outside lanes they
behave as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from ubatch.lanes.context import check_voted, current_lane
from ubatch.process.interrupts import Patches, Replacement

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

_inside: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
"""torch's object for a module's weights -> the lanes that are inside the module."""


def sharing_weights() -> AbstractContextManager[None]:
    """Let lanes in the `with` block share weights that `fully_shard` gathers; does nothing if it is not in use."""
    return nullcontext() if _FSDP not in sys.modules else _patches.applied()


def _replacements() -> Iterator[Replacement]:
    _inside.clear()  # failed lanes have not removed themselves
    kind = sys.modules[_FSDP].FSDPParamGroup
    gather, free = kind.pre_forward, kind.post_forward

    def pre_forward(weights: Any, *args: Any) -> Any:
        lane = current_lane()
        if lane is not None:
            if not weights.is_unsharded:
                import torch.distributed as dist  # here, because some builds of torch lack it

                ranks = dist.get_process_group_ranks(weights._all_gather_process_group)
                check_voted(lane, ranks, "fully_shard's gather of weights")
            _inside.setdefault(weights, set()).add(lane.id)
        return gather(weights, *args)

    def post_forward(weights: Any, module: Any, inputs: Any, output: Any) -> Any:
        lane = current_lane()
        if lane is not None:
            others = _inside.get(weights, set())
            others.discard(lane.id)
            if others:
                return output
        return free(weights, module, inputs, output)

    yield kind, "pre_forward", gather, pre_forward
    yield kind, "post_forward", free, post_forward


_patches = Patches(_replacements)
