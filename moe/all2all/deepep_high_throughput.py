"""`deepep_high_throughput`: DeepEP's kernels for prefill, which take SMs and reach the links' bandwidth.

    layout     which rank gets how many rows, on the device
    dispatch   the host waits for the counts, as the receiver's memory is allocated to the row; then rows travel
    combine    one row per (token, rank) travels back, already summed over that rank's experts, and is added up

Tokens arrive as rows (`Dispatched`), in bfloat16 or in fp8 with a scale per block of 128.

One buffer serves all lanes: DeepEP's stream runs their kernels one after the other (`moe.all2all.deepep`), and what a
dispatch leaves for its combine is in its handle.

**Capture** needs `worst_case=True`: room for every token of every rank, so that no count is needed on the host. Of one
node only.

Not yet run on several GPUs: see `moe.all2all.deepep`. Source: DeepEP's README; vLLM's `DeepEPHTPrepareAndFinalize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe.all2all.base import Dispatched, StepSizes, refuse_gradients
from moe.all2all.deepep import GIL_HELD_S, NODE, DeepEPBuffers, DeepEPStreamed, Payload
from moe.all2all.voted import voted_tokens
from ubatch import CommGroup, ConfigError, Transfer, capturing, current_sm_budget, report_sm_use
from ubatch.collectives import check_launch
from ubatch.connection import Connection
from ubatch.long_calls import holding_gil

__all__ = ["DeepEPHighThroughputAll2All", "HighThroughputHandle"]

_QPS_PER_RANK = 24


@dataclass(frozen=True)
class HighThroughputHandle:
    """How results come home.

    Attributes:
        buffer: DeepEP's, through which the tokens came.
        layout: DeepEP's handle.
        num_sms: what dispatch took; combine must take as many.
    """

    buffer: Any
    layout: Any
    num_sms: int


@dataclass(frozen=True)
class _Sized:
    """A DeepEP buffer and the most SMs that it has room for."""

    buffer: Any
    max_sms: int


class DeepEPHighThroughputAll2All(DeepEPStreamed):
    """Sends each token once to every rank that holds one of its experts.

    Ids must be -1 or an expert's: DeepEP does not look.

    Args:
        group: the expert-parallel ranks: 2, 4 or 8 of one node, or whole nodes.
        num_experts: experts of all ranks.
        use_fp8: quantise tokens before dispatch, half the bytes; results travel in bfloat16.
        worst_case: receive into room for all tokens of all ranks, which the vote tells, instead of waiting on the
            host for their number.

    Raises:
        ConfigError: DeepEP is missing, has no settings for so many ranks, or `worst_case` between nodes.
    """

    asynchronous = "async_finish"

    def __init__(self, *, group: CommGroup, num_experts: int, use_fp8: bool = False, worst_case: bool = False) -> None:
        super().__init__("deepep_high_throughput", group, num_experts, use_fp8=use_fp8, worst_case=worst_case)
        if worst_case and group.size > NODE:
            raise ConfigError(
                f"worst_case receives without counts inside one node of {NODE} ranks, but the group has {group.size}. "
                "Leave it out."
            )
        self._default_sms = int(self.deep_ep.Buffer.num_sms)
        self._config("get_dispatch_config", self._default_sms)  # refuses a number of ranks that has none
        self._buffers = DeepEPBuffers(self.name, self._make_buffer)

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, object]:
        """See `FollowsSteps`: without counts where steps shall be captured, and the ranks are one node's."""
        return {"worst_case": sizes.captured and num_ranks <= NODE}

    def capture(self) -> Any:
        """See `DeepEPStreamed`."""
        return self.deep_ep.Buffer.capture()

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[HighThroughputHandle]]:
        """See `All2All`."""
        self.check_payload(x, topk_ids, topk_weights)
        connection = check_launch(x, self.group, "dispatch")
        self.check_rows(x)
        prepared = self.take_prepared(x)
        ids, weights = self.ids(topk_ids), topk_weights.contiguous()
        sized = self._buffers.get(connection, x.shape[1], x.device.index or 0)
        num_sms, worst_tokens = min(self._num_sms(), sized.max_sms), self._worst_tokens()
        with self.ordered(prepared) as order:
            to_rank, to_node, to_expert, is_in_rank, laid_out = sized.buffer.get_dispatch_layout(
                ids, self.num_experts, **order
            )
            if "previous_event" in order:
                order["previous_event"] = laid_out
            with nullcontext() if worst_tokens else holding_gil("counts of peers", GIL_HELD_S):
                rows, local_ids, row_weights, _, layout, event = sized.buffer.dispatch(
                    prepared.payload,
                    num_tokens_per_rank=to_rank,
                    num_tokens_per_rdma_rank=to_node,
                    is_token_in_rank=is_in_rank,
                    num_tokens_per_expert=to_expert,
                    topk_idx=ids,
                    topk_weights=weights,
                    num_worst_tokens=worst_tokens,
                    config=self._config("get_dispatch_config", num_sms),
                    **order,
                )
        handle = HighThroughputHandle(sized.buffer, layout, num_sms)
        return Transfer(
            "dispatch",
            (self.after(event, order),),
            lambda: self._arrived(rows, local_ids, row_weights, handle),
            stream_ordered=True,
            keep=(prepared, ids, weights, rows, local_ids, row_weights, layout, is_in_rank),
        )

    def combine(self, y: Tensor, handle: HighThroughputHandle) -> Transfer[Tensor]:
        """See `All2All`."""
        refuse_gradients(y, name=self.name)
        self.check_results(y)
        check_launch(y, self.group, "combine")
        with self.ordered(self.prepare(y, quantized=False)) as order:
            results, _, event = handle.buffer.combine(
                y, handle.layout, config=self._config("get_combine_config", handle.num_sms), **order
            )
        return Transfer(
            "combine", (self.after(event, order),), lambda: results, stream_ordered=True, keep=(y, handle, results)
        )

    # -- what travels ---------------------------------------------------------------------------------------------

    def _worst_tokens(self) -> int:
        """How many rows may come at most; 0 lets DeepEP wait for their number."""
        if not self.worst_case:
            return 0
        tokens = voted_tokens(self.group)
        if tokens is None and capturing():
            raise ConfigError(
                f"all2all back end {self.name!r} cannot be captured without every rank's tokens, but the ranks did not "
                "vote on this step. Capture under a UBatchWrapper whose config has the group."
            )
        return 0 if tokens is None else max(1, sum(tokens))

    def _arrived(
        self, rows: Payload, local_ids: Tensor, weights: Tensor, handle: HighThroughputHandle
    ) -> Dispatched[HighThroughputHandle]:
        hidden_states, scales = rows if isinstance(rows, tuple) else (rows, None)
        return Dispatched(hidden_states, self.global_ids(local_ids), weights, handle, self.experts, scales)

    # -- DeepEP's settings ----------------------------------------------------------------------------------------

    def _num_sms(self) -> int:
        budget = current_sm_budget()
        if budget is None:
            return self._default_sms
        report_sm_use(self.name, obeys=budget.comm >= 2)
        return max(2, budget.comm // 2 * 2)  # DeepEP takes them in pairs: one sends, one receives

    def _config(self, which: str, num_sms: int) -> Any:
        """DeepEP's settings; the number of SMs in them is its class's."""
        buffer = self.deep_ep.Buffer
        if buffer.num_sms != num_sms:
            buffer.set_num_sms(num_sms)
        try:
            return getattr(buffer, which)(self.group.size)
        except AssertionError as error:
            raise ConfigError(
                f"all2all back end {self.name!r} has no settings for {self.group.size} ranks: {error}."
            ) from error

    def _make_buffer(self, connection: Connection, key: tuple[int, ...]) -> _Sized:
        hidden_bytes, num_sms = key[0] * 2, max(self._num_sms(), self._default_sms)
        configs = [self._config(which, num_sms) for which in ("get_dispatch_config", "get_combine_config")]
        size = self.group.size
        buffer = self.deep_ep.Buffer(
            connection.pg,
            max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs),
            max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs),
            num_qps_per_rank=max(_QPS_PER_RANK, num_sms),
        )
        return _Sized(buffer, num_sms)
