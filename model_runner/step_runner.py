"""One step of a runner at a time.

    launch     build        the requests' next tokens, flattened (`input_batch`)
               coordinate   vote with the other ranks whether to overlap (`dp`)
               plan         attention for the whole batch, or one plan per lane
               forward      the wrapped model, in lanes or not; hidden states come back merged
                            (or plan and forward as a captured graph: `model_runner.graphs`)
               (the last layer's MLP runs only for the rows that are sampled, or whose hidden states are read)
    sample     logits of the last token of each request only, then its next token (`pending_step`)
    result     the tokens on the host

With several ranks each step is collective: a rank without requests launches `()` and runs the same layers with no
tokens, because its experts are needed. When no rank has requests, nothing runs and `StepOutput.all_idle` says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from attention import KVCache, RequestToTokenTable, StatePool, UBatchAttention
from model_runner.auto.step_settings import StepSettings
from model_runner.decoder.base import CausalLM
from model_runner.graphs.steps import GraphSteps
from model_runner.parallel.tensor_parallel import WHOLE, TensorParallel
from model_runner.pending_step import PendingStep, SamplingContext, StepOutput
from model_runner.speculation.accept import check_acceptance
from model_runner.speculation.proposer import StepObserver
from model_runner.step.context import step_context
from model_runner.step.dp import Coordination, content_of, coordinate_batch_across_dp
from model_runner.step.input_batch import InputBatch, build_input_batch
from model_runner.step.request import ScheduledRequest
from model_runner.step.streams import StepStreams
from ubatch import (
    CommGroup,
    ForwardContext,
    ForwardMode,
    SplitCost,
    UBatchConfig,
    UBatchWrapper,
    set_forward_context,
)
from ubatch.streams.small_copies import to_device

__all__ = ["StepRunner"]


class StepRunner:
    """The steps of `ModelRunner`, which makes what they run with."""

    group: CommGroup | None
    tensor_parallel: TensorParallel | None
    device: torch.device
    dbo: UBatchConfig
    model: CausalLM
    kv_cache: KVCache
    states: StatePool | None
    request_table: RequestToTokenTable
    attention: UBatchAttention
    wrapper: UBatchWrapper
    graphs: GraphSteps | None
    step_settings: StepSettings
    split_cost: SplitCost
    streams: StepStreams
    _sampling: SamplingContext
    _voted_at: float | None = None

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share this rank's replica."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size

    def set_observer(self, observer: StepObserver | None) -> None:
        """Set the observer: from the next step on it gets hidden states and new tokens when a step's result is read.

        With an observer, read each step's result before the next launch.
        """
        self._sampling = replace(self._sampling, observer=observer)

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """Run one step to its end: `launch`, `sample`, `result`. The requests themselves are not changed.

        Args:
            scheduled: prefills, chunks of prefills and decodes in any mixture, or decodes with drafts; empty on an idle
                rank.

        Raises:
            RequestError, KVCacheExhausted: the batch does not fit its requests; see `build_input_batch`.
            PeerFailed, TransferTimeout, GroupBroken, UBatchTimeout: the step could not finish; see these classes.
        """
        with self.together():
            step = self.launch(scheduled)
            step.sample()
            return step.result()

    @torch.inference_mode()
    def launch(self, scheduled: Sequence[ScheduledRequest]) -> PendingStep:
        """Start a step with the requests as they are now. On a CPU its forward has run when this returns; on a GPU it
        is queued on the forward stream.

        Args:
            scheduled: see `execute`. The last token of a request may be `PENDING_TOKEN`, if its step was sampled.

        Raises:
            StepOrderError: a pending token was not sampled yet.
            Others: see `execute`.
        """
        with self.together(), self.streams.forward():
            check_acceptance(scheduled, self._sampling.acceptance)
            masked = self.graphs is not None and self.graphs.takes_trees
            table, spec = self.request_table, self.kv_cache.spec
            batch = build_input_batch(scheduled, table, spec, self.device, mask_chains=masked)
            batch = replace(batch, input_ids=self._sampling.future_map.resolve(batch.input_ids, batch.pending))
            self._follow_states(batch)
            for span in batch.prompt_spans:
                self._sampling.prompt_carry.launch(span)
            agreed = self.coordinate(batch, *self.step_settings.settings(batch.shape))
            if agreed.all_idle:
                return PendingStep(self._sampling, batch, agreed.decision, None, all_idle=True)
            logits = prompt_hidden = row_sums = None
            with self.step_settings.timed(agreed.decision):
                needed = None if self._sampling.observer is not None else batch.needed_rows
                hidden = self._hidden_states(batch, agreed, needed)
                if batch.logits_rows.shape[0]:
                    logits = self.model.compute_logits(hidden.index_select(0, batch.logits_rows))
            if batch.prompt_spans:
                prompt_hidden = hidden.index_select(0, self._prompt_rows(batch))
            self._keep_states(batch)
            if batch.num_tokens > batch.logits_rows.shape[0]:  # to check rows without logits for nan and infinity
                row_sums = hidden[: batch.num_tokens].sum(dim=-1, dtype=torch.float32)
            return PendingStep(self._sampling, batch, agreed.decision, logits, prompt_hidden, hidden, row_sums)

    def _follow_states(self, batch: InputBatch) -> None:
        """Restore the recurrent states, if there are some, and tell them which tokens the step runs; once per step."""
        if self.states is not None:
            verify = batch.mode is ForwardMode.TARGET_VERIFY
            slots = batch.metadata.state_slots or ()
            found = [(share.restore, slot) for share, slot in zip(batch.scheduled, slots, strict=True)]
            if pairs := [(number, slot) for number, slot in found if number is not None]:
                self.states.restore(*zip(*pairs, strict=True))
            self.states.follow(slots, batch.shape.prefix_lens, batch.shape.query_lens, verify=verify)

    def _keep_states(self, batch: InputBatch) -> None:
        """Copy the recurrent states that the step's shares keep; on its stream, so before the next step's changes."""
        if self.states is not None:
            slots = batch.metadata.state_slots or ()
            found = [(slot, share.keep) for share, slot in zip(batch.scheduled, slots, strict=True)]
            if pairs := [(slot, number) for slot, number in found if number is not None]:
                self.states.keep(*zip(*pairs, strict=True))

    def restart_clock(self) -> None:
        """Reset the step clock after an idle time, so that the next vote does not count it as the step's period."""
        self._voted_at = None

    def coordinate(
        self, batch: InputBatch, dbo: UBatchConfig | None = None, no_gain: bool = False, told: tuple[int, ...] = ()
    ) -> Coordination:
        """Vote with the other ranks on a step.

        Args:
            dbo: replaces the runner's own settings, if given.
            no_gain: vote against overlap, because no gain is expected.
            told: numbers for the other ranks, `Offer.told`.
        """
        could_replay = 0
        if self.graphs is not None:
            metadata = batch.metadata
            could_replay = self.graphs.offer(batch.shape, metadata.max_seq_len, tree=metadata.has_tree)
        size = self.tensor_parallel_size
        content = content_of(batch.scheduled) if size > 1 else 0
        now = time.perf_counter()
        voted_at, self._voted_at = self._voted_at, now
        shape = replace(
            batch.shape,
            cost=self.split_cost,
            graph_mode=could_replay,
            content=content,
            period_us=0 if voted_at is None else int((now - voted_at) * 1e6),
            no_gain=no_gain,
            told=told,
        )
        agreed = coordinate_batch_across_dp(self.dbo if dbo is None else dbo, shape, self.group, size)
        return agreed if self.graphs is None else self.graphs.agree(agreed)

    def forward(self, batch: InputBatch, agreed: Coordination) -> Tensor:
        """The logits of the sampled rows, `[S, vocab_size]`; the step overlaps if the vote says so.

        The caller's stream waits for the logits.
        """
        with self.streams.forward(join=True):
            return self.model.compute_logits(self._hidden_states(batch, agreed).index_select(0, batch.logits_rows))

    def _hidden_states(
        self, batch: InputBatch, agreed: Coordination, needed_rows: Sequence[int] | None = None
    ) -> Tensor:
        if self.graphs is not None and agreed.graph is not None:
            return self.graphs.replay(batch, agreed, agreed.graph)
        with self.streams.planning():
            context = self.forward_context(batch, agreed, needed_rows)
        with set_forward_context(context):
            hidden: Tensor = self.wrapper(batch.input_ids, batch.positions)
        return hidden

    def _prompt_rows(self, batch: InputBatch) -> Tensor:
        rows = [torch.arange(span.first_row, span.first_row + len(span.targets)) for span in batch.prompt_spans]
        (placed,) = to_device([torch.cat(rows)], self.device)
        return placed

    def forward_context(
        self, batch: InputBatch, agreed: Coordination, needed_rows: Sequence[int] | None = None
    ) -> ForwardContext:
        """The step's context: one attention plan, or if it overlaps, one context and plan per lane.

        Args:
            needed_rows: rows of the batch whose output is read, ascending; None for all.
        """
        shard = WHOLE if self.tensor_parallel is None else self.tensor_parallel.shard
        return step_context(batch, agreed, self.attention, shard, needed_rows=needed_rows)

    def together(self) -> AbstractContextManager[None]:
        """Context for collective work: an error in the `with` block fails the other ranks at once, naming this one.

        After an error the group needs `reset()` on every rank. See `CommGroup.step`.
        """
        return nullcontext() if self.group is None else self.group.step()
