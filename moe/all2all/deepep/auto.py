"""`deepep_auto`: low latency for decode and verify, high throughput for prefill, step by step.

Every rank must choose the same, or they wait for each other in different kernels. So the choice depends only on the
result of the vote, which is the same on all ranks:

    low latency    every rank that has tokens decodes or verifies, and no rank has more than the buffers have room for
    high throughput    otherwise: a rank prefills, or a mode is unknown

A rank without tokens follows the others, whatever its own mode is.

Source: vLLM's and SGLang's `auto` mode, which go by the engine's role (decode or prefill) instead.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits, StepSizes
from moe.all2all.deepep.base import check_ranks
from moe.all2all.deepep.high_throughput import DeepEPHighThroughputAll2All, HighThroughputHandle
from moe.all2all.deepep.low_latency import DeepEPLowLatencyAll2All, LowLatencyHandle
from moe.all2all.layouts import BatchedDispatch, Dispatched
from ubatch import CommGroup, ConfigError, ForwardMode, Transfer, fingerprint, get_forward_context

AutoHandle = HighThroughputHandle | LowLatencyHandle

_LOW_LATENCY = frozenset(fingerprint(mode) for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY))


class DeepEPAutoAll2All(All2All[Any]):
    """Two DeepEP back ends, of which each step uses one.

    Memory is for both; beyond one node it is the same, as one process can have no two such buffers
    (`moe.all2all.deepep.buffers`).

    Args:
        max_tokens_per_rank, share_buffer: of `deepep_low_latency`.
        worst_case: of `deepep_high_throughput`.

    Raises:
        ConfigError: as the two.
    """

    def __init__(
        self,
        *,
        group: CommGroup,
        num_experts: int,
        max_tokens_per_rank: int = 128,
        use_fp8: bool = False,
        share_buffer: bool | None = None,
        worst_case: bool = False,
    ) -> None:
        self.low_latency = DeepEPLowLatencyAll2All(
            group=group,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            use_fp8=use_fp8,
            share_buffer=share_buffer,
        )
        self.high_throughput = DeepEPHighThroughputAll2All(
            group=group, num_experts=num_experts, use_fp8=use_fp8, worst_case=worst_case
        )
        if not self.low_latency.one_node:
            self.high_throughput.buffers = self.low_latency.share_with(self.high_throughput.settings.size_of)
        self.group = group
        self.num_experts = num_experts
        self.experts = self.low_latency.experts

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        """See `All2All`: what either refuses."""
        check_ranks("deepep_auto", num_ranks)
        DeepEPLowLatencyAll2All.check_options(options, num_ranks)
        DeepEPHighThroughputAll2All.check_options(options, num_ranks)

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, object]:
        """See `All2All`: decode and verify by low latency, as far as there is room, else without counts if they
        shall be captured."""
        low_latency = DeepEPLowLatencyAll2All.default_options(sizes, num_ranks)
        if low_latency["max_tokens_per_rank"] >= sizes.decode:
            return low_latency
        return {**low_latency, **DeepEPHighThroughputAll2All.default_options(sizes, num_ranks)}

    @property
    def traits(self) -> All2AllTraits:  # type: ignore[override]
        """Those of the back end that this step uses; batches may arrive in the next one."""
        return replace(self._chosen().traits, batched=True)

    def traits_for(self, mode: ForwardMode, tokens: int) -> All2AllTraits:
        return replace(self._suited({fingerprint(mode)}, tokens).traits, batched=True)

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        self._chosen().inputs_ready(x, topk_ids, topk_weights, blocks)

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Transfer[Dispatched[HighThroughputHandle]] | Transfer[BatchedDispatch[LowLatencyHandle]]:
        """See `All2All`.

        Raises:
            ConfigError: the ranks did not vote on this step, though it has a mode that they may not share.
        """
        return self._chosen().dispatch(x, topk_ids, topk_weights)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[Any]]:
        return self._chosen().dispatch_chunks(x, topk_ids, topk_weights, blocks)

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[Any]]:
        return self._chosen().dispatch_cut(x, topk_ids, topk_weights, blocks)

    def combine(self, y: Tensor, handle: AutoHandle) -> Transfer[Tensor]:
        """See `All2All`. The results go home the way their tokens came."""
        if isinstance(handle, LowLatencyHandle):
            return self.low_latency.combine(y, handle)
        return self.high_throughput.combine(y, handle)

    def _chosen(self) -> DeepEPLowLatencyAll2All | DeepEPHighThroughputAll2All:
        context = get_forward_context()
        if context is None:
            return self.high_throughput
        decision, tokens = context.decision, context.tokens_across_ranks
        if decision is None or tokens is None:
            raise ConfigError(
                "all2all back end 'deepep_auto' follows what the ranks voted on, but this step's forward context has "
                "no decision. Set UBatchConfig.group, or choose one of the two back ends."
            )
        busy = {mode for mode, row in zip(decision.modes, decision.tokens, strict=True) if any(row)}
        return self._suited(busy, max(tokens))

    def _suited(self, modes: Set[int], tokens: int) -> DeepEPLowLatencyAll2All | DeepEPHighThroughputAll2All:
        """The back end for a step of these modes (fingerprints), in which no rank has more than `tokens` tokens."""
        fits = tokens <= self.low_latency.max_tokens_per_rank
        return self.low_latency if fits and modes <= _LOW_LATENCY else self.high_throughput
