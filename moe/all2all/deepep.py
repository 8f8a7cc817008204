"""What the DeepEP back ends share: the package, its limits, and the buffers.

DeepEP (https://github.com/deepseek-ai/DeepEP) moves tokens between GPUs by its own kernels, over NVLink inside a node
and RDMA between nodes. Its `Buffer` is registered memory, made by all ranks together:

    made       at the first launch that needs it, which every rank reaches at the same place; never during capture
    made anew  after the group was reset, on the group's new connection

A rank that fails leaves the others' kernels waiting inside DeepEP; after DeepEP's own time-out (100 s) those end their
process. So unlike a gloo group, a group that runs DeepEP does not survive a failed rank by `CommGroup.reset`.

While a dispatch waits for its peers' counts, and while a buffer is made, Python's lock is held and nothing else of the
process runs: `ubatch.long_calls.holding_gil` tells the peers before.

**Not yet run on several GPUs.** These adapters were proved with a stand-in for `deep_ep` that has its signatures,
checks arguments and the order of calls, and exchanges over gloo (`tests/deep_ep_standin.py`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from moe.all2all.base import All2AllTraits, check_dispatch
from moe.experts.quantization import quantize_tokens
from moe.placement import local_experts
from ubatch import CommGroup, ConfigError, capturing, dbo_current_ubatch_id, on_comm_stream
from ubatch.connection import Connection
from ubatch.long_calls import holding_gil

__all__ = [
    "GIL_HELD_S",
    "NODE",
    "DeepEPBuffers",
    "DeepEPStreamed",
    "DeepEPTransport",
    "Payload",
    "Prepared",
    "Queued",
    "import_deep_ep",
]

BufferT = TypeVar("BufferT")
Payload = Tensor | tuple[Tensor, Tensor]

GIL_HELD_S = 100.0
"""How long the older buffer's dispatch waits for its peers' counts, inside a node with Python's lock held."""
_BUFFER_S = 300.0
"""How long all ranks may take to make a buffer, or to end one; Python's lock is held, and DeepEP sets no limit."""
NODE = 8
"""Ranks that DeepEP takes to be one node's, joined by NVLink."""
_ROW_BYTES = 512
"""A warp copies 32 times 16 bytes at once."""


def import_deep_ep(name: str) -> Any:
    """The module `deep_ep`.

    Args:
        name: the back end that needs it.

    Raises:
        ConfigError: it is not installed, or cannot be loaded here.
    """
    try:
        return importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"all2all back end {name!r} needs DeepEP, but importing deep_ep failed: {error}. Build it from "
            "https://github.com/deepseek-ai/DeepEP for this machine's CUDA and torch, or use 'torch_dist'."
        ) from error


class DeepEPTransport:
    """What is the same in all DeepEP back ends.

    Args:
        name: of the back end.
        group: the expert-parallel ranks.
        num_experts: experts of all ranks.

    Raises:
        ConfigError: no CommGroup, DeepEP missing, experts that do not divide by the ranks, or so many ranks that they
            are neither one node nor whole nodes.
    """

    def __init__(self, name: str, group: CommGroup, num_experts: int) -> None:
        if not isinstance(group, CommGroup):
            raise ConfigError(
                f"all2all back end {name!r} needs a CommGroup, not {type(group).__name__}. "
                "Make one: CommGroup.from_process_group(pg)."
            )
        if group.size > NODE and group.size % NODE:
            raise ConfigError(
                f"all2all back end {name!r} serves up to {NODE} ranks, or whole nodes of {NODE} each, not "
                f"{group.size} ranks."
            )
        self.name = name
        self.group = group
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, group.rank, group.size)
        self.deep_ep = import_deep_ep(name)

    def check_payload(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Refuse what no DeepEP kernel carries.

        Raises:
            GradientError: gradients would be lost on the way.
            ConfigError: hidden states that are not bfloat16, or not `[T, H]`.
        """
        check_dispatch(x, topk_ids, topk_weights, name=self.name)
        if x.dtype != torch.bfloat16 or x.dim() != 2:
            raise ConfigError(
                f"all2all back end {self.name!r} carries bfloat16 [tokens, hidden], not {x.dtype} {list(x.shape)}. "
                "Load the model in bfloat16, or use 'torch_dist'."
            )

    def check_results(self, y: Tensor) -> None:
        """Refuse results that no DeepEP kernel brings home.

        Raises:
            ConfigError: they are not bfloat16, or not contiguous.
        """
        if y.dtype != torch.bfloat16 or not y.is_contiguous():
            contiguous = "contiguous" if y.is_contiguous() else "strided"
            raise ConfigError(
                f"all2all back end {self.name!r} brings home contiguous bfloat16 results, not {contiguous} {y.dtype} "
                f"{list(y.shape)}."
            )

    def ids(self, topk_ids: Tensor) -> Tensor:
        """`topk_ids` as DeepEP was built to read them."""
        return topk_ids.to(getattr(self.deep_ep, "topk_idx_t", torch.int64)).contiguous()


@dataclass(frozen=True)
class Prepared:
    """Tensors ready to travel, and since when.

    Attributes:
        x: `[T, H]` as the layer gave them.
        payload: as they will travel: contiguous, or fp8 with scales.
        computed: DeepEP's mark behind what computed them; None where stream order alone is to be kept.
    """

    x: Tensor
    payload: Payload
    computed: Any


class DeepEPStreamed(DeepEPTransport, ABC):
    """A back end whose kernels run on DeepEP's own communication stream.

    All lanes share that stream, in the order of the baton. What a launch waits for is marked before the lane hands on,
    and DeepEP marks what it used for the allocator itself (`record_stream`). Such marks would keep every layer's memory
    until the end of a capture. So while a graph is captured DeepEP runs in its synchronous mode, on the lane's own
    communication stream, forked anew by each launch: whoever gets this memory next comes after all that read it.

    Args:
        name, group, num_experts: see `DeepEPTransport`.
        use_fp8: quantise tokens before dispatch.
        worst_case: room for all tokens of all ranks, so that no counts are exchanged.
    """

    asynchronous: ClassVar[str]
    """What DeepEP calls the flag of its asynchronous mode."""

    def __init__(self, name: str, group: CommGroup, num_experts: int, *, use_fp8: bool, worst_case: bool) -> None:
        super().__init__(name, group, num_experts)
        self.use_fp8 = use_fp8
        self.worst_case = worst_case
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=not worst_case,
            capturable=worst_case,
            max_lanes=None,
            max_chunks=len(self.experts),
            other_ranks=group.size - 1,
            routed=True,
            obeys_sms=True,
        )
        self._prepared: dict[int, tuple[Prepared, int]] = {}

    @abstractmethod
    def capture(self) -> Any:
        """DeepEP's mark behind what the current stream has so far."""

    def inputs_ready(self, x: Tensor, dispatches: int = 1) -> None:
        """See `MarksInputs`."""
        self._prepared[dbo_current_ubatch_id()] = self.prepare(x, quantized=self.use_fp8), dispatches

    def take_prepared(self, x: Tensor) -> Prepared:
        """What `inputs_ready` left for this lane, or the same made now."""
        lane = dbo_current_ubatch_id()
        prepared, dispatches = self._prepared.pop(lane, (None, 0))
        if prepared is None or prepared.x is not x:
            return self.prepare(x, quantized=self.use_fp8)
        if dispatches > 1:
            self._prepared[lane] = prepared, dispatches - 1
        return prepared

    def prepare(self, x: Tensor, *, quantized: bool) -> Prepared:
        """Let `x` be what travels next."""
        payload: Payload = quantize_tokens(x) if quantized else x.contiguous()
        return Prepared(x, payload, None if capturing() else self.capture())

    @contextmanager
    def ordered(self, prepared: Prepared) -> Iterator[dict[str, Any]]:
        """DeepEP's arguments for launching `prepared`."""
        if prepared.computed is None:
            with on_comm_stream():
                yield {}
        else:
            yield {"previous_event": prepared.computed, self.asynchronous: True, "allocate_on_comm_stream": True}

    def after(self, event: Any, order: dict[str, Any]) -> Queued:
        """What lets a stream wait for a launch; the synchronous mode has ordered the stream already."""
        return Queued(event.current_stream_wait if order else None)

    def global_ids(self, local_ids: Tensor) -> Tensor:
        """DeepEP counts experts from this rank's first, and -1 is none of them: nor is the one before the first."""
        return local_ids + self.experts.start if self.experts.start else local_ids

    def check_rows(self, x: Tensor) -> None:
        """Refuse rows that the kernels cannot copy.

        Raises:
            ConfigError: hidden states that are not a multiple of 512 bytes.
        """
        row_bytes = x.shape[1] * (1 if self.use_fp8 else 2)
        if row_bytes % _ROW_BYTES:
            raise ConfigError(
                f"all2all back end {self.name!r} carries rows of a multiple of {_ROW_BYTES} bytes, not hidden size "
                f"{x.shape[1]} in {'fp8' if self.use_fp8 else 'bfloat16'} ({row_bytes} bytes). Use 'torch_dist'."
            )


class DeepEPBuffers(Generic[BufferT]):
    """Buffers by key, each made at its first use.

    Args:
        name: the back end, for errors.
        make: makes one; every rank calls it at the same launch.
    """

    def __init__(self, name: str, make: Callable[[Connection, tuple[int, ...]], BufferT]) -> None:
        self._name = name
        self._make = make
        self._connection: Connection | None = None
        self._buffers: dict[tuple[int, ...], BufferT] = {}

    def get(self, connection: Connection, *key: int) -> BufferT:
        """The buffer for `key`, on `connection`.

        Raises:
            ConfigError: it would have to be made while a graph is captured.
        """
        if connection is not self._connection:
            if self._buffers:  # each waits for its peers when it goes
                with holding_gil("DeepEP's buffers", _BUFFER_S):
                    self._buffers.clear()
            self._connection = connection
        if key not in self._buffers:
            if capturing():
                raise ConfigError(
                    f"all2all back end {self._name!r} has no buffer for this lane and shape yet, and cannot make one "
                    "while a graph is captured. Run the same step once before."
                )
            with holding_gil("DeepEP's buffer", _BUFFER_S):
                self._buffers[key] = self._make(connection, key)
        return self._buffers[key]

    def __len__(self) -> int:
        return len(self._buffers)


class Queued:
    """A work that only stream order says the end of: `wait` lets the current stream wait, once, and returns at once.

    Args:
        order: what makes it so: an event's wait, or the launch of the receiving kernel.
    """

    def __init__(self, order: Callable[[], object] | None = None) -> None:
        self._order = order

    def is_completed(self) -> bool:
        """Always: what was launched needs nothing more of the host."""
        return True

    def wait(self, timeout: object = None) -> bool:
        """Order the current stream after it."""
        order, self._order = self._order, None
        if order is not None:
            order()
        return True
