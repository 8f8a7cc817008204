"""Attention of a draft model that decodes several tokens in a row: one plan per step, all made before the first step.

    step i     one row per request: the token at position seq_len + i, which sees seq_len + i + 1 tokens
    state i    a separate back end (workspace, plan), because plans of one object may share buffers

So nothing is planned or waited for between two draft steps, and all steps together can be one CUDA graph. Lengths are
known in advance, because a draft model accepts every token that it drafts. Each step drafts one token per request; only
decode back ends are made, no prefill.
(For a tree of drafts, each level is a verify batch with a mask: `SpecVerifyInput`.)

Source: the multi-step draft back ends of SGLang, where this is `speculative_step_id` and `skip_prefill`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attention.backends.registry import make_attention_backend, resolve_attention_backend
from attention.interface import AttentionBackend, GraphLimits, Shape
from attention.kv_cache import KVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, ForwardMode


class MultiStepDraftAttention:
    """Plans the decode steps that draft a chain.

    Args:
        shape: the draft model's attention shape.
        kv_cache: the draft model's KV cache.
        num_steps: the most decode steps in a row, 1 or more.
        backend: name of the back end, as for decode batches.

    Attributes:
        backend_name: the back end in use; differs from `backend` if that is `auto`.

    Raises:
        ConfigError: no step at all, an unknown back end, or one that lacks what the model needs.
    """

    def __init__(self, shape: Shape, kv_cache: KVCache, num_steps: int, backend: str = "auto") -> None:
        if num_steps < 1:
            raise ConfigError(f"a draft model decodes at least 1 step in a row, not {num_steps}.")
        self.backend_name = resolve_attention_backend(backend, shape, kv_cache)
        self._states: list[AttentionBackend] = [
            make_attention_backend(self.backend_name, shape, kv_cache) for _ in range(num_steps)
        ]

    @property
    def num_steps(self) -> int:
        """The most decode steps in a row."""
        return len(self._states)

    def plan(self, seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> list[Any]:
        """The plans of the next steps, one per row of `slots`; each holds until the next call.

        Args:
            seq_lens: tokens of each request that are in the draft model's cache before the first step.
            block_table: `[R, max_blocks]` int32; covers the last step's token, too.
            slots: `[steps, R]` int64; step i writes to row i, the slots of position `seq_len + i`.

        Raises:
            ConfigError: more steps than `num_steps`, or sizes that contradict each other.
        """
        batches = self._batches(seq_lens, block_table, slots)
        return [state.plan(batch) for state, batch in zip(self._states, batches, strict=False)]

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """Make the buffers of captured steps, for every state.

        Raises:
            ConfigError: the back end cannot be captured.
        """
        for state in self._states:
            state.init_graph_buffers(limits)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> list[Any]:
        """The plans of all `num_steps` steps that a graph is captured with, for a decode batch of its size.

        Raises:
            ConfigError: there are no graph buffers for one this large.
        """
        return [state.plan_for_graph(metadata) for state in self._states]

    def replan(self, plans: Sequence[Any], seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> None:
        """Make plans of `plan_for_graph` describe these steps, padded. Call it before a replay. Arguments as `plan`.

        Raises:
            ConfigError: the requests do not fit the plans, or sizes contradict each other.
        """
        batches = self._batches(seq_lens, block_table, slots)
        for state, plan, batch in zip(self._states, plans, batches, strict=True):
            state.replan(plan, batch)

    def _batches(self, seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> list[CommonAttentionMetadata]:
        steps = slots.shape[0]
        if steps > self.num_steps:
            raise ConfigError(
                f"{steps} draft steps were planned, but there are states for {self.num_steps}; make more of them."
            )
        ones = [1] * len(seq_lens)
        return [
            CommonAttentionMetadata.build(
                ones, [length + step + 1 for length in seq_lens], block_table, own, ForwardMode.DECODE
            )
            for step, own in enumerate(slots)
        ]

    def memory(self) -> Mapping[str, int]:
        """Bytes that each state holds now, by name: `step 0/torch`, ..."""
        return {f"step {step}/{state.name}": state.nbytes for step, state in enumerate(self._states)}
