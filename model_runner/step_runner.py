"""One step of a runner at a time: a `Step` gets its batch, the ranks' decision, and runs.

    launch     batch        the requests' next tokens, flattened (`step.batch`)
               agree        vote with the other ranks whether to overlap (`step.dp`)
               run          plan attention for the whole batch, or for each lane (`plan_step`); then the wrapped
                            model, in lanes or not; hidden states come back merged
                            (or plan and forward as a captured graph: `model_runner.graphs`)
               (the last layer's MLP runs only for the rows that are sampled, or whose hidden states are read)
    sample     logits of the last token of each request only, then its next token (`pending_step`)
    result     the tokens on the host

With several ranks each step is collective: a rank without requests launches `()` and runs the same layers with no
tokens, because its experts are needed. When no rank has requests, nothing runs and `StepOutput.all_idle` says so.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from model_runner.auto.step_settings import Proposal, StepSettings
from model_runner.balance import Mover
from model_runner.drafting import DraftNetwork, DraftProposer
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.pending_step import PendingStep, StepOutput
from model_runner.speculation import StepObserver, check_acceptance
from model_runner.step.batch import build_input_batch
from model_runner.step.dp import content_of, coordinate_batch_across_dp, plan_step
from model_runner.step.request import ScheduledRequest
from model_runner.step.step import Step
from moe import ExpertPlacement
from ubatch import ForwardMode, SplitCost, UBatchError, UBatchWrapper
from ubatch.ranks import in_gaps
from ubatch.streams import to_device
from ubatch.wrapper import run_decided


class StepRunner(CapturingRunner):
    """The steps of `ModelRunner`, which makes what they run with."""

    step_settings: StepSettings
    split_cost: SplitCost
    draft: DraftNetwork | None
    proposer: DraftProposer | None
    placement: ExpertPlacement | None
    mover: Mover | None = None
    closed = False
    _voted_at: float | None = None

    def check_open(self) -> None:
        """Raises `UBatchError` once the runner was closed."""
        if self.closed:
            raise UBatchError("this ModelRunner was closed. Make another one.")

    def set_observer(self, observer: StepObserver | None) -> None:
        """Set the observer: from the next step on it gets hidden states and new tokens when a step's result is read.

        With an observer, read each step's result before the next launch.
        """
        self.observer = observer

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
    def launch(self, scheduled: Step | Sequence[ScheduledRequest]) -> PendingStep:
        """Start a step with the requests as they are now. On a CPU its forward has run when this returns; on a GPU it
        is queued on the forward stream.

        Args:
            scheduled: a step of `Step.of`, or its shares; see `execute`. The last token of a request may be
                `PENDING_TOKEN`, if its step was sampled.

        Raises:
            StepOrderError: a pending token was not sampled yet.
            Others: see `execute`.
        """
        with self.together(), self.streams.forward():
            step = self.agree(self.batch(scheduled))
            if step.all_idle:
                return PendingStep(self, step, None)
            logits = prompt_hidden = row_sums = None
            needed = None if self.observer is not None else step.needed_rows
            with self.step_settings.timed(step.decision):
                hidden = self.run(step, needed_rows=needed)
                if step.logits_rows_cpu:
                    logits = self.model.compute_logits(hidden.index_select(0, step.logits_rows))
            if step.prompt_spans:
                rows = [torch.arange(span.first_row, span.first_row + len(span.targets)) for span in step.prompt_spans]
                prompt_hidden = hidden.index_select(0, *to_device([torch.cat(rows)], self.device))
            self._keep_states(step)
            if step.num_tokens > len(step.logits_rows_cpu):  # to check rows without logits for nan and infinity
                row_sums = hidden[: step.num_tokens].sum(dim=-1, dtype=torch.float32)
            return PendingStep(self, step, logits, prompt_hidden, hidden, row_sums)

    def batch(self, scheduled: Step | Sequence[ScheduledRequest]) -> Step:
        """The step with its batch, whose pending tokens are looked up; and what begins with a batch, begun.

        Raises:
            StepOrderError, RequestError, KVCacheExhausted: see `launch`.
            UBatchError: the runner was closed.
        """
        if self.closed:
            self.check_open()
        step = scheduled if isinstance(scheduled, Step) else Step.of(scheduled)
        check_acceptance(step.shares, self.settings.acceptance)
        masked = self.graphs is not None and self.graphs.takes_trees
        step = build_input_batch(step, self.request_table, self.kv_cache.spec, self.device, mask_chains=masked)
        if step.pending:
            step = replace(step, input_ids=self.future_map.resolve(step.input_ids, step.pending))
        self._follow_states(step)
        for span in step.prompt_spans:
            self.prompt_carry.launch(span)
        return step

    def agree(self, step: Step, proposal: Proposal | None = None) -> Step:
        """The step after the vote of all ranks.

        Args:
            proposal: what this rank votes with; by default, what `step_settings` proposes.
        """
        dbo, no_gain, told = self.step_settings.settings(step) if proposal is None else proposal
        size, graphs, now = self.tensor_parallel_size, self.graphs, time.perf_counter()
        voted_at, self._voted_at = self._voted_at, now
        numbers = {
            "graph_mode": 0 if graphs is None else graphs.offer(step),
            "content": content_of(step.shares) if size > 1 else 0,
            "period_us": 0 if voted_at is None else int((now - voted_at) * 1e6),
            "moving": 0 if self.mover is None else self.mover.tell(),
        }
        dbo, cost = self.dbo if dbo is None else dbo, self.split_cost
        step = coordinate_batch_across_dp(dbo, step, self.group, size, cost, no_gain=no_gain, told=told, **numbers)
        if self.mover is not None and step.decision is not None:
            self.mover.heard(step.decision.moving)
            self.placement = self.mover.placement
        return step if graphs is None else graphs.agree(step)

    def run(
        self, step: Step, wrapper: UBatchWrapper | None = None, *, needed_rows: Sequence[int] | None = None
    ) -> Tensor:
        """Run an agreed step; returns its hidden states, `[T, hidden_size]`, on the current stream.

        Args:
            wrapper: runs the model in place of the runner's own; then no graph is replayed.
            needed_rows: rows that are read, ascending; None for all.
        """
        if wrapper is None and step.graph is not None and self.graphs is not None:
            return self.graphs.replay(step, step.graph)
        with self.streams.planning():
            step = plan_step(step, self.attention, self._shard, needed_rows=needed_rows)
        with nullcontext() if self.mover is None or not self.mover.busy else in_gaps(self.mover.fill_gap):
            outputs = run_decided(self.wrapper if wrapper is None else wrapper, step)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def forward(self, step: Step) -> Tensor:
        """The logits of an agreed step's sampled rows, `[S, vocab_size]`; the caller's stream waits for them."""
        with self.streams.forward(join=True):
            return self.model.compute_logits(self.run(step).index_select(0, step.logits_rows))

    def _follow_states(self, step: Step) -> None:
        """Restore the recurrent states, if there are some, and tell them which tokens the step runs; once per step."""
        if self.states is not None:
            verify = step.mode is ForwardMode.TARGET_VERIFY
            slots = step.metadata.state_slots or ()
            found = [(share.restore, slot) for share, slot in zip(step.shares, slots, strict=True)]
            if pairs := [(number, slot) for number, slot in found if number is not None]:
                self.states.restore(*zip(*pairs, strict=True))
            self.states.follow(slots, step.prefix_lens, step.query_lens, verify=verify)

    def _keep_states(self, step: Step) -> None:
        """Copy the recurrent states that the step's shares keep; on its stream, so before the next step's changes."""
        if self.states is not None:
            slots = step.metadata.state_slots or ()
            found = [(slot, share.keep) for share, slot in zip(step.shares, slots, strict=True)]
            if pairs := [(slot, number) for slot, number in found if number is not None]:
                self.states.keep(*zip(*pairs, strict=True))

    def restart_clock(self) -> None:
        """Reset the step clock after an idle time, so that the next vote does not count it as the step's period."""
        self._voted_at = None
