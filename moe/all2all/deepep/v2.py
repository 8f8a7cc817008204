"""`deepep_v2`: DeepEP 2's `ElasticBuffer`, one set of kernels for prefill and decode.

    dispatch   counts on the device; the host waits for them only to receive into exactly as much memory as needed
    combine    one row per (token, rank) travels back, already summed over that rank's experts, and is added up

Tokens arrive as rows (`Dispatched`), in bfloat16 or in fp8 with a scale per block of 128. One
buffer serves all lanes, as in `deepep_high_throughput`; `async_with_compute_stream` is the asynchronous mode.

**Capture** needs `worst_case=True`: room for as many tokens of every rank as the one with most has (rounded up to a
power of two: DeepEP compiles a kernel for every number). Rows behind those that came are undefined, and routed nowhere.

Source: DeepEP's `deep_ep/buffers/elastic.py`; vLLM's `DeepEPV2PrepareAndFinalize`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe.all2all.base import StepSizes
from moe.all2all.deepep.base import DeepEPStreamed, Inputs, check_ranks, sms_in_force
from moe.all2all.deepep.buffers import DeepEPBuffers
from moe.all2all.layouts import Dispatched
from moe.all2all.voted import voted_tokens
from ubatch import CommGroup, ConfigError, Transfer
from ubatch.ranks import Connection, check_launch, holding_gil

_MAX_TOP_K = 32
_GIL_HELD_S = 300.0
"""DeepEP's own limit of its wait for counts (`num_cpu_timeout_secs`). Every kernel is compiled at its first call, too,
with Python's lock held."""


@dataclass(frozen=True)
class ElasticHandle:
    """What combine needs to return results.

    Attributes:
        buffer: DeepEP's, through which the tokens came.
        route: DeepEP's `EPHandle`.
    """

    buffer: Any
    route: Any


class DeepEPV2All2All(DeepEPStreamed):
    """Sends each token once to every rank that holds one of its experts.

    Ids must be -1 or an expert's: DeepEP does not look.

    Args:
        max_tokens_per_rank: the most tokens that any rank, or lane of it, may dispatch at once. All ranks must give the
            same. DeepEP's memory is for this many: about `2 * R * max_tokens_per_rank * (2 H + 8 k)` bytes of R ranks;
            lanes share it.
        use_fp8: quantise tokens before dispatch, half the bytes; results travel in bfloat16.
        worst_case: receive into room for the most tokens there can be, instead of waiting on the host for their number.

    Raises:
        ConfigError: DeepEP is missing, or older than 2.
    """

    asynchronous = "async_with_compute_stream"

    def __init__(
        self,
        *,
        group: CommGroup,
        num_experts: int,
        max_tokens_per_rank: int = 4096,
        use_fp8: bool = False,
        worst_case: bool = False,
    ) -> None:
        super().__init__("deepep_v2", group, num_experts, use_fp8=use_fp8, worst_case=worst_case)
        if not hasattr(self.deep_ep, "ElasticBuffer"):
            version = getattr(self.deep_ep, "__version__", "unknown")
            raise ConfigError(
                f"all2all back end 'deepep_v2' needs DeepEP 2 with its ElasticBuffer; this one is {version}. Install a "
                "newer one, or use 'deepep_high_throughput'."
            )
        self.check_options({"max_tokens_per_rank": max_tokens_per_rank}, group.size)
        self.max_tokens_per_rank = max_tokens_per_rank
        self.traits = replace(self.traits, max_tokens=max_tokens_per_rank)
        self._buffers = DeepEPBuffers(self.name, self._make_buffer)

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        check_ranks("deepep_v2", num_ranks)
        room = options.get("max_tokens_per_rank", 1)
        if room < 1:
            raise ConfigError(f"max_tokens_per_rank must be at least 1, not {room}.")

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, object]:
        """See `All2All`: room for the largest step; without counts where steps shall be captured."""
        room = {} if sizes.largest is None else {"max_tokens_per_rank": sizes.largest}
        return {**room, "worst_case": sizes.captured}

    def capture(self) -> Any:
        return self.deep_ep.ElasticBuffer.capture()

    def launch(self, inputs: Inputs, ids: Tensor) -> Transfer[Dispatched[ElasticHandle]]:
        x = inputs.given[0]
        if ids.shape[1] > _MAX_TOP_K:
            raise ConfigError(f"all2all back end {self.name!r} serves top_k up to {_MAX_TOP_K}, not {ids.shape[1]}.")
        self.check_room(x.shape[0])
        connection = check_launch(x, self.group, "dispatch")
        buffer = self._buffers.get(connection, x.shape[1], ids.shape[1], x.device.index or 0)
        counted = not self.worst_case
        with self.ordered(inputs.sent) as order, holding_gil("counts of peers", _GIL_HELD_S):
            rows, local_ids, row_weights, route, event = buffer.dispatch(
                inputs.sent.payload,
                topk_idx=ids,
                topk_weights=inputs.weights,
                num_experts=self.num_experts,
                num_max_tokens_per_rank=self._room(),
                num_sms=sms_in_force(self.name, default=0),  # 0 lets DeepEP choose by the links' bandwidth
                do_cpu_sync=counted,
                **order,
            )
        handle = ElasticHandle(buffer, route)
        return Transfer(
            "dispatch",
            (self.after(event, order),),
            lambda: self.arrived(rows, self._global_ids(local_ids, route, counted), row_weights, handle),
            stream_ordered=True,
            keep=(inputs, rows, local_ids, row_weights, route),
        )

    def launch_combine(self, y: Tensor, handle: ElasticHandle, order: dict[str, Any]) -> tuple[Tensor, Any]:
        with holding_gil("DeepEP's compiler", _GIL_HELD_S):
            results, _, event = handle.buffer.combine(y, handle.route, **order)
        return results, event

    # -- what travels ---------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """The tokens per rank to make room for; the same on every rank."""
        tokens = voted_tokens(self.group) if self.worst_case else None
        if tokens is None:
            return self.max_tokens_per_rank
        most = max(1, *tokens)
        return min(1 << (most - 1).bit_length(), self.max_tokens_per_rank)

    def _global_ids(self, local_ids: Tensor, route: Any, counted: bool) -> Tensor:
        """Global ids of the received rows; without counts, the ids of the undefined rows behind them become -1."""
        ids = self.global_ids(local_ids)
        if counted:
            return ids
        came = route.psum_num_recv_tokens_per_scaleup_rank[-1]
        rows = torch.arange(ids.shape[0], device=ids.device)
        return torch.where((rows < came).unsqueeze(1), ids, -1)

    # -- DeepEP's settings ----------------------------------------------------------------------------------------

    def _make_buffer(self, connection: Connection, key: tuple[int, ...]) -> Any:
        hidden_size, top_k, _ = key
        return self.deep_ep.ElasticBuffer(
            connection.pg,
            num_max_tokens_per_rank=self.max_tokens_per_rank,
            hidden=hidden_size,
            num_topk=top_k,
            use_fp8_dispatch=self.use_fp8,
        )
