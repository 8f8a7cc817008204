"""`deepep_high_throughput`: DeepEP's kernels for prefill, which take SMs and reach the links' bandwidth.

    layout     which rank gets how many rows, on the device
    dispatch   the host waits for the counts, as the receiver's memory is allocated to the row; then rows travel
    combine    one row per (token, rank) travels back, already summed over that rank's experts, and is added up

Tokens arrive as rows (`Dispatched`), in bfloat16 or in fp8 with a scale per block of 128.

One buffer serves all lanes: DeepEP's stream runs their kernels one after the other (`moe.all2all.deepep.base`), and
what a dispatch leaves for its combine is in its handle.

**Capture** needs `worst_case=True`: room for every token of every rank, so that no count is needed on the host. Of one
node only.

Source: DeepEP's README; vLLM's `DeepEPHTPrepareAndFinalize`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe.all2all.base import StepSizes
from moe.all2all.deepep.base import DeepEPStreamed, Inputs, check_ranks, sms_in_force
from moe.all2all.deepep.buffers import NODE, BufferSize, SizedBuffers, in_one_node
from moe.all2all.layouts import Dispatched
from moe.all2all.voted import voted_tokens
from ubatch import CommGroup, ConfigError, Transfer, capturing
from ubatch.ranks import check_launch, holding_gil

_QPS_PER_RANK = 24
_GIL_HELD_S = 100.0
"""How long a dispatch waits for its peers' counts, inside a node with Python's lock held."""


@dataclass(frozen=True)
class HighThroughputHandle:
    """What combine needs to return results.

    Attributes:
        buffer: DeepEP's, through which the tokens came.
        num_sms: what dispatch took; combine must take as many.
    """

    buffer: Any
    layout: Any
    num_sms: int


@dataclass(frozen=True)
class _Settings:
    """DeepEP's settings of the normal kernels.

    Attributes:
        default_sms: where nobody reserves any.
    """

    name: str
    deep_ep: Any
    ranks: int
    default_sms: int

    def num_sms(self) -> int:
        """How many SMs the schedule in force gives them."""
        return sms_in_force(self.name, self.default_sms)

    def config(self, which: str, num_sms: int) -> Any:
        """DeepEP's recommendation; the number of SMs in it is its class's."""
        buffer = self.deep_ep.Buffer
        if buffer.num_sms != num_sms:
            buffer.set_num_sms(num_sms)
        try:
            return getattr(buffer, which)(self.ranks)
        except AssertionError as error:
            raise ConfigError(
                f"all2all back end {self.name!r} has no settings for {self.ranks} ranks: {error}."
            ) from error

    def size_of(self, hidden_size: int) -> BufferSize:
        """What a buffer for `[T, hidden_size]` is made for."""
        hidden_bytes, num_sms = hidden_size * 2, max(self.num_sms(), self.default_sms)
        configs = [self.config(which, num_sms) for which in ("get_dispatch_config", "get_combine_config")]
        return BufferSize(
            max(config.get_nvl_buffer_size_hint(hidden_bytes, self.ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(hidden_bytes, self.ranks) for config in configs),
            queues=max(_QPS_PER_RANK, num_sms),
            num_sms=num_sms,
        )


class DeepEPHighThroughputAll2All(DeepEPStreamed):
    """Sends each token once to every rank that holds one of its experts.

    Ids must be -1 or an expert's: DeepEP does not look.

    Args:
        group: the expert-parallel ranks: 2, 4 or 8 of one node, or whole nodes.
        use_fp8: quantise tokens before dispatch, half the bytes; results travel in bfloat16.
        worst_case: receive into room for all tokens of all ranks, which the vote tells, instead of waiting on the
            host for their number.

    Raises:
        ConfigError: DeepEP is missing, has no settings for so many ranks, or `worst_case` between nodes.
    """

    asynchronous = "async_finish"

    def __init__(self, *, group: CommGroup, num_experts: int, use_fp8: bool = False, worst_case: bool = False) -> None:
        super().__init__("deepep_high_throughput", group, num_experts, use_fp8=use_fp8, worst_case=worst_case)
        self.check_options({"worst_case": worst_case}, group.size)
        default_sms = int(self.deep_ep.Buffer.num_sms)
        self.settings = _Settings(self.name, self.deep_ep, group.size, default_sms)
        self.settings.config("get_dispatch_config", default_sms)  # refuses a number of ranks that has none
        self.buffers = SizedBuffers(self.name, self.deep_ep, self.settings.size_of)

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        check_ranks("deepep_high_throughput", num_ranks)
        if options.get("worst_case") and not in_one_node(num_ranks):
            raise ConfigError(
                f"worst_case receives without counts inside one node of {NODE} ranks, but the group has {num_ranks}. "
                "Leave it out."
            )

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, object]:
        """See `All2All`: without counts where steps shall be captured, and the ranks are one node's."""
        return {"worst_case": sizes.captured and num_ranks <= NODE}

    def capture(self) -> Any:
        return self.deep_ep.Buffer.capture()

    def launch(self, inputs: Inputs, ids: Tensor) -> Transfer[Dispatched[HighThroughputHandle]]:
        x = inputs.given[0]
        connection = check_launch(x, self.group, "dispatch")
        sized = self.buffers.buffer_for(x, connection)
        buffer, sized.dirty = sized.deep_ep, True
        num_sms, worst_tokens = min(self.settings.num_sms(), sized.size.num_sms), self._worst_tokens()
        with self.ordered(inputs.sent) as order:
            to_rank, to_node, to_expert, is_in_rank, laid_out = buffer.get_dispatch_layout(
                ids, self.num_experts, **order
            )
            if "previous_event" in order:
                order["previous_event"] = laid_out
            with nullcontext() if worst_tokens else holding_gil("counts of peers", _GIL_HELD_S):
                rows, local_ids, row_weights, _, layout, event = buffer.dispatch(
                    inputs.sent.payload,
                    num_tokens_per_rank=to_rank,
                    num_tokens_per_rdma_rank=to_node,
                    is_token_in_rank=is_in_rank,
                    num_tokens_per_expert=to_expert,
                    topk_idx=ids,
                    topk_weights=inputs.weights,
                    num_worst_tokens=worst_tokens,
                    config=self.settings.config("get_dispatch_config", num_sms),
                    **order,
                )
        handle = HighThroughputHandle(buffer, layout, num_sms)
        return Transfer(
            "dispatch",
            (self.after(event, order),),
            lambda: self.arrived(rows, self.global_ids(local_ids), row_weights, handle),
            stream_ordered=True,
            keep=(inputs, rows, local_ids, row_weights, layout, is_in_rank),
        )

    def launch_combine(self, y: Tensor, handle: HighThroughputHandle, order: dict[str, Any]) -> tuple[Tensor, Any]:
        config = self.settings.config("get_combine_config", handle.num_sms)
        results, _, event = handle.buffer.combine(y, handle.layout, config=config, **order)
        return results, event

    # -- what travels ---------------------------------------------------------------------------------------------

    def _worst_tokens(self) -> int:
        """The most rows that can arrive; 0 lets DeepEP wait for their number."""
        if not self.worst_case:
            return 0
        tokens = voted_tokens(self.group)
        if tokens is None and capturing():
            raise ConfigError(
                f"all2all back end {self.name!r} cannot be captured without every rank's tokens, but the ranks did not "
                "vote on this step. Capture under a UBatchWrapper whose config has the group."
            )
        return 0 if tokens is None else max(1, sum(tokens))
