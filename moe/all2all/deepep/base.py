"""Code that the DeepEP back ends share: the package, its limits, and the order of its launches.

DeepEP (https://github.com/deepseek-ai/DeepEP) moves tokens between GPUs by its own kernels, over NVLink inside a node
and RDMA between nodes, through buffers that all ranks make together (`moe.all2all.deepep.buffers`).

A rank that fails leaves the others' kernels waiting inside DeepEP; after DeepEP's own time-out (100 s) those end their
process. So unlike a gloo group, a group that runs DeepEP does not survive a failed rank by `CommGroup.reset`.

While a dispatch waits for its peers' counts, and while a buffer is made, Python's lock is held and nothing else of the
process runs: `ubatch.ranks.long_calls.holding_gil` tells the peers before.

**Not yet run on several GPUs.** These adapters were proved with a stand-in for `deep_ep` that has its signatures,
checks arguments and the order of calls, and exchanges over gloo (`tests/support/deep_ep_standin.py`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.deepep.buffers import NODE, in_one_node
from moe.all2all.layouts import Dispatched, ids_of_blocks
from moe.all2all.payload import check_dispatch, refuse_gradients
from moe.experts.quantization import quantize_tokens
from moe.placement import local_experts
from ubatch import (
    CommGroup,
    ConfigError,
    Transfer,
    capturing,
    current_sm_budget,
    dbo_current_ubatch_id,
    import_optional,
    on_comm_stream,
    report_sm_use,
)
from ubatch.ranks import Queued, check_group, check_launch

Payload = Tensor | tuple[Tensor, Tensor]

_MIN_SMS = 2
_ROW_BYTES = 512
"""A warp copies 32 times 16 bytes at once."""


def import_deep_ep(name: str) -> Any:
    """The module `deep_ep`.

    Raises:
        ConfigError: it is not installed, or cannot be loaded here.
    """
    return import_optional(
        "deep_ep",
        f"All2all back end {name!r} needs DeepEP: build it from https://github.com/deepseek-ai/DeepEP for this "
        "machine's CUDA and torch, or use 'torch_dist'.",
    )


def check_ranks(name: str, num_ranks: int) -> None:
    """Refuse ranks that are neither one node nor whole nodes.

    Raises:
        ConfigError: the number of ranks is neither.
    """
    if num_ranks > NODE and num_ranks % NODE:
        raise ConfigError(
            f"all2all back end {name!r} serves up to {NODE} ranks, or whole nodes of {NODE} each, not {num_ranks} "
            "ranks."
        )


def sms_in_force(name: str, default: int) -> int:
    """How many SMs the schedule in force gives DeepEP, which takes them in pairs: one sends, one receives.

    Args:
        default: the number if the schedule reserves none.
    """
    budget = current_sm_budget()
    if budget is None:
        return default
    report_sm_use(name, obeys=budget.comm >= _MIN_SMS)
    return max(_MIN_SMS, budget.comm // 2 * 2)


class DeepEPTransport(All2All[Any]):
    """The base of all DeepEP back ends.

    Attributes:
        max_tokens_per_rank: the most tokens of a rank that a dispatch has room for, where that is fixed.

    Raises:
        ConfigError: no CommGroup, DeepEP missing, experts that do not divide by the ranks, or so many ranks that they
            are neither one node nor whole nodes.
    """

    max_tokens_per_rank: int

    def __init__(self, name: str, group: CommGroup, num_experts: int) -> None:
        check_group(group, f"all2all back end {name!r} needs")
        check_ranks(name, group.size)
        self.name = name
        self.group = group
        self.one_node = in_one_node(group.size)
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
            GradientError: gradients would be lost on the way.
            ConfigError: they are not bfloat16, or not contiguous.
        """
        refuse_gradients(y, name=self.name)
        if y.dtype != torch.bfloat16 or not y.is_contiguous():
            contiguous = "contiguous" if y.is_contiguous() else "strided"
            raise ConfigError(
                f"all2all back end {self.name!r} brings home contiguous bfloat16 results, not {contiguous} {y.dtype} "
                f"{list(y.shape)}."
            )

    def check_room(self, tokens: int) -> None:
        """Refuse more tokens of a rank than its buffers are made for.

        Raises:
            ConfigError: there are more.
        """
        if tokens > self.max_tokens_per_rank:
            raise ConfigError(
                f"all2all back end {self.name!r} has room for {self.max_tokens_per_rank} tokens of a rank at once, not "
                f"{tokens}. Let the ranks vote on the step (UBatchConfig.group), so that it goes in pieces, or raise "
                "max_tokens_per_rank on every rank."
            )

    def ids(self, topk_ids: Tensor) -> Tensor:
        """`topk_ids` as DeepEP was built to read them."""
        return topk_ids.to(getattr(self.deep_ep, "topk_idx_t", torch.int64)).contiguous()


@dataclass(frozen=True)
class Prepared:
    """Tensors that are ready to be sent, and the event to wait for.

    Attributes:
        payload: the form in which they are sent: contiguous, or fp8 with scales.
        computed: DeepEP's event behind their computation; None if stream order is enough.
    """

    payload: Payload
    computed: Any


@dataclass(frozen=True)
class Inputs:
    """All tensors that the next dispatches of a lane read. The event in `sent` is recorded after all of them.

    Attributes:
        given: `x`, `topk_ids` and `topk_weights`, as the layer gave them.
        blocks: of local experts, one per dispatch.
        ids: `[T, k]` per dispatch, as DeepEP reads them.
        weights: `[T, k]`, contiguous.
        sent: `x`, ready to travel.
    """

    given: tuple[Tensor, Tensor, Tensor]
    blocks: tuple[range, ...]
    ids: tuple[Tensor, ...]
    weights: Tensor
    sent: Prepared

    def are(self, given: tuple[Tensor, ...], blocks: Sequence[range]) -> bool:
        """Whether these inputs were made for the same tensors and blocks."""
        return self.blocks == tuple(blocks) and all(own is its for own, its in zip(self.given, given, strict=True))


class DeepEPStreamed(DeepEPTransport):
    """A back end whose kernels run on DeepEP's own communication stream.

    All lanes share that stream, in the order in which they run. A dispatch waits for an event recorded before the lane
    handed over, so it computes nothing itself: all tensors that it reads are in its `Inputs`. DeepEP calls
    `record_stream` on the tensors it used, which would keep every layer's memory until the end of a capture. So during
    a capture DeepEP runs in its synchronous mode, on the lane's own communication stream, forked anew by each launch:
    later users of this memory are ordered after all its readers.

    Args:
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
        self._inputs: dict[int, Inputs] = {}

    @abstractmethod
    def capture(self) -> Any:
        """DeepEP's event behind the current stream's work so far."""

    @abstractmethod
    def launch(self, inputs: Inputs, ids: Tensor) -> Transfer[Dispatched[Any]]:
        """Launch one dispatch.

        Args:
            inputs: what it reads.
            ids: one of `inputs.ids`.
        """

    @abstractmethod
    def launch_combine(self, y: Tensor, handle: Any, order: dict[str, Any]) -> tuple[Tensor, Any]:
        """Launch the return of the results; returns the output, and DeepEP's event behind it.

        Args:
            y: see `All2All.combine`, as handle.
            order: from `ordered`.
        """

    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        self.check_results(y)
        check_launch(y, self.group, "combine")
        with self.ordered(self.prepare(y, quantized=False)) as order:
            results, event = self.launch_combine(y, handle, order)
        return Transfer(
            "combine", (self.after(event, order),), lambda: results, stream_ordered=True, keep=(y, handle, results)
        )

    def arrived(self, rows: Payload, ids: Tensor, weights: Tensor, handle: Any) -> Dispatched[Any]:
        """Wrap the rows that a dispatch delivered, with scales if they are fp8; `ids` are global ones."""
        hidden_states, scales = rows if isinstance(rows, tuple) else (rows, None)
        return Dispatched(hidden_states, ids, weights, handle, self.experts, scales)

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        self._inputs[dbo_current_ubatch_id()] = self._make_inputs(x, topk_ids, topk_weights, blocks)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Any]]:
        (transfer,) = self.dispatch_chunks(x, topk_ids, topk_weights, [range(len(self.experts))])
        return transfer

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> list[Transfer[Dispatched[Any]]]:
        inputs = self._inputs.pop(dbo_current_ubatch_id(), None)
        if inputs is None or not inputs.are((x, topk_ids, topk_weights), blocks):
            inputs = self._make_inputs(x, topk_ids, topk_weights, blocks)
        return [self.launch(inputs, ids) for ids in inputs.ids]

    def _make_inputs(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> Inputs:
        self.check_payload(x, topk_ids, topk_weights)
        self.check_rows(x)
        ids = tuple(self.ids(each) for each in ids_of_blocks(topk_ids, blocks, len(self.experts)))
        weights = topk_weights.contiguous()
        sent = self.prepare(x, quantized=self.use_fp8)  # last: the mark is behind all of it
        return Inputs((x, topk_ids, topk_weights), tuple(blocks), ids, weights, sent)

    def prepare(self, x: Tensor, *, quantized: bool) -> Prepared:
        """Prepare `x` to be sent next, and record an event behind all that was computed so far."""
        payload: Payload = quantize_tokens(x) if quantized else x.contiguous()
        return Prepared(payload, None if capturing() else self.capture())

    @contextmanager
    def ordered(self, prepared: Prepared) -> Iterator[dict[str, Any]]:
        """DeepEP's arguments for launching `prepared`."""
        if prepared.computed is None:
            with on_comm_stream():
                yield {}
        else:
            yield {"previous_event": prepared.computed, self.asynchronous: True, "allocate_on_comm_stream": True}

    def after(self, event: Any, order: dict[str, Any]) -> Queued:
        """The `Queued` that lets a stream wait for a launch; in synchronous mode the stream is ordered already."""
        return Queued(event.current_stream_wait if order else None)

    def global_ids(self, local_ids: Tensor) -> Tensor:
        """Convert local ids, counted from this rank's first expert, to global ids. -1 becomes an id outside of them."""
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
