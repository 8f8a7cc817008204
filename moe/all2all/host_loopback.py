"""`host_loopback`: one GPU holds all experts, and the bytes for other ranks are copied to host memory and back.

It replaces a network on a machine with one GPU: no token reaches another rank. But the bytes are real, packed as in
`torch_dist`. The GPU's copy engines move them over PCIe on the communication stream, so they take time but no SM, as
with a network card. With `sms`, kernels move them and hold that many SMs while they send, as NCCL's and DeepEP's do. It
works eagerly and in a CUDA graph, in lanes and outside.

    dispatch    pack rows (compute) | device -> pinned host -> device (comm) | unpack (compute, in `wait`)
    combine     results             | device -> pinned host -> device (comm) | the results

Pinned memory is made once per lane and grows with the largest message, never while a graph is captured: a graph keeps
the address. Messages of one lane share it, because the communication stream carries them one after the other. On a CPU
the same copies go through ordinary memory, and are done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.layouts import Dispatched
from moe.all2all.payload import check_dispatch, pack_rows, refuse_gradients, unpack_rows
from moe.placement import local_experts
from ubatch import (
    CommGroup,
    ConfigError,
    Transfer,
    capturing,
    current_sm_budget,
    dbo_current_ubatch_id,
    dbo_enabled,
    on_comm_stream,
    report_sm_use,
)
from ubatch.ranks import Queued
from ubatch.streams import Event


class HostLoopbackAll2All(All2All[None]):
    """Sends every token, and every result, through host memory.

    Args:
        group: None, or a group of one rank.
        bytes_factor: bytes copied per byte of payload, at least 1: the payload is copied once, then parts of it again.
            For measurements that need slower communication; there are no artificial waits.
        sms: how many SMs move the bytes, where a schedule reserves none for communication (`comm_sms`); 0 leaves it to
            the copy engines. By Triton: a CPU needs its interpreter.

    Attributes:
        bytes_factor: as above; may be set between two steps, not once a graph was captured.

    Raises:
        ConfigError: the group has more than one rank, a factor below 1, or fewer than no SMs.
    """

    def __init__(
        self, *, group: CommGroup | None = None, num_experts: int, bytes_factor: float = 1.0, sms: int = 0
    ) -> None:
        self.check_options({"bytes_factor": bytes_factor, "sms": sms}, 1 if group is None else group.size)
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, 0, 1)
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=False,
            capturable=True,
            max_lanes=None,
            max_chunks=num_experts,
            other_ranks=0,
            routed=False,
            obeys_sms=sms > 0,
        )
        self.bytes_factor = bytes_factor
        self._sms = sms
        self._staging: dict[tuple[int | None, torch.device], Staging] = {}

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        if num_ranks != 1:
            raise ConfigError(
                f"all2all back end 'host_loopback' stands in for a network: it serves one rank, not {num_ranks}. "
                "Use 'torch_dist' or 'allgather_reducescatter'."
            )
        bytes_factor, sms = options.get("bytes_factor", 1.0), options.get("sms", 0)
        if not 1 <= bytes_factor < float("inf"):
            raise ConfigError(f"bytes_factor must be at least 1 (the payload itself crosses), not {bytes_factor}.")
        if sms < 0:
            raise ConfigError(f"sms must be at least 0 (0 takes none), not {sms}.")

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[None]]:
        check_dispatch(x, topk_ids, topk_weights, name="host_loopback")
        hidden_size = x.shape[1]
        rows = self.travel("dispatch", pack_rows(x, topk_ids, topk_weights))
        return rows.map(lambda arrived: Dispatched(*unpack_rows(arrived, hidden_size), None, self.experts))

    def combine(self, y: Tensor, handle: None) -> Transfer[Tensor]:
        refuse_gradients(y, name="host_loopback")
        return self.travel("combine", y.contiguous())

    @property
    def pinned_bytes(self) -> int:
        """Host memory held, of all lanes."""
        return sum(staging.nbytes for staging in self._staging.values())

    def travel(self, name: str, rows: Tensor) -> Transfer[Tensor]:
        """Launch a message to the host and back; what `dispatch` and `combine` do with their rows.

        Args:
            rows: contiguous, any shape and dtype.

        Returns:
            A transfer of a copy of `rows`.

        Raises:
            ConfigError: a graph is being captured, and there is no pinned memory for so many bytes.
        """
        message = self.prepare(rows.shape, rows.dtype, rows.device)
        return self.launch(name, message, lambda host: self._copy(host, _as_bytes(rows)), keep=(rows,))

    def prepare(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Message:
        """Allocate what a message needs, before any of it is launched.

        Raises:
            ConfigError: see `travel`.
        """
        # Made on the compute stream: the transfer keeps it until that stream has joined the copies.
        arrived = torch.empty(*shape, dtype=dtype, device=device)
        if not arrived.numel():
            return Message(arrived, None)
        key = lane_here(), device
        if key not in self._staging:
            self._staging[key] = Staging(device)
        return Message(arrived, self._staging[key].at_least(arrived.nbytes)[: arrived.nbytes])

    def launch(
        self,
        name: str,
        message: Message,
        send: Callable[[Tensor], object],
        *,
        fork: Event | None = None,
        keep: Sequence[object] = (),
    ) -> Transfer[Tensor]:
        """Launch a prepared message to the host and back.

        Args:
            send: called on the communication stream, writes the payload to host memory `[bytes]` uint8.
        """
        arrived, host, num_bytes = message.arrived, message.host, 0
        if host is not None:
            target = _as_bytes(arrived)
            with on_comm_stream(fork):
                for size in _passes(host.numel(), self.bytes_factor):
                    if num_bytes:
                        self._copy(host[:size], target[:size])
                    else:
                        send(host)
                    self._copy(target[:size], host[:size])
                    num_bytes += size
        return Transfer(
            name,
            (Queued(),),
            lambda: arrived,
            stream_ordered=True,
            keep=(*keep, arrived),
            bytes_sent=num_bytes,
            bytes_received=num_bytes,
        )

    def _copy(self, out: Tensor, x: Tensor) -> None:
        """Launch a copy of bytes, one of them the host's."""
        if not self._sms:
            out.copy_(x, non_blocking=True)
            return
        from moe.kernels.copy import copy_on_sms
        from ubatch.kernels.triton_jit import INTERPRETED

        if not (INTERPRETED or out.is_cuda or x.is_cuda):
            raise ConfigError(
                "host_loopback's sms are a GPU's. Leave them out; for tests, set TRITON_INTERPRET=1 before Triton is "
                "imported."
            )
        budget = current_sm_budget()
        report_sm_use("host_loopback", obeys=True)
        copy_on_sms(out, x, self._sms if budget is None else budget.comm)


@dataclass(frozen=True)
class Message:
    """A message that is ready to be launched.

    Attributes:
        arrived: the tensor that it is copied back to.
        host: `[bytes]` uint8, the lane's memory that it passes through; None if the message is empty.
    """

    arrived: Tensor
    host: Tensor | None


class Staging:
    """One lane's memory for messages of any size.

    Args:
        for_signals: whether it is the device's own memory, zeros; else the host's.

    Attributes:
        memory: `[capacity]` uint8; the host's is pinned for a GPU.
        captured: whether a graph holds the address of `memory`.
        outgrown: memory that graphs hold the address of, and newer messages do not fit into.
    """

    def __init__(self, device: torch.device, *, for_signals: bool = False) -> None:
        self._device = device
        self._for_signals = for_signals
        self._allocate(0)
        self.captured = False
        self.outgrown: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in (*self.outgrown, self.memory))

    def at_least(self, num_bytes: int) -> Tensor:
        if self.memory.numel() < num_bytes:
            if capturing():
                raise ConfigError(
                    f"host_loopback has {'signals' if self._for_signals else 'pinned memory'} for "
                    f"{self.memory.numel()} bytes, not for a message of {num_bytes}, and cannot make more while a "
                    "graph is captured. Run the largest step once without a graph first."
                )
            if self.captured:
                self.outgrown, self.captured = (*self.outgrown, self.memory), False
            self._allocate(1 << (num_bytes - 1).bit_length())  # powers of two: pinning is slow
        self.captured |= capturing()
        return self.memory

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    def _allocate(self, capacity: int) -> None:
        # Copies may still read the old memory: torch hands pinned memory out again only after them.
        if self._for_signals:
            self.memory = torch.zeros(capacity, dtype=torch.uint8, device=self._device)
        else:
            self.memory = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def lane_here() -> int | None:
    """The lane that this code runs in; None outside a lane."""
    return dbo_current_ubatch_id() if dbo_enabled() else None


def _passes(num_bytes: int, factor: float) -> list[int]:
    """The sizes of the copies: the whole payload as often as it fits into `factor` times its bytes, then a part."""
    whole, part = divmod(round(num_bytes * factor), num_bytes)
    return [num_bytes] * whole + [part] * bool(part)


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)
