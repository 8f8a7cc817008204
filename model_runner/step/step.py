"""One step, from the scheduler's plan to the lanes: who fills what, in the order in which things become known.

    scheduled   `Step.of`, called by the scheduler       which tokens of which requests
    batched     `step.batch.build_input_batch`           these tokens, flattened, on host and device
    agreed      `step.dp.coordinate_batch_across_dp`     whether the ranks overlap, and where this rank cuts
    planned     `step.dp.plan_step`                      attention, and the arguments of every lane

Each of these returns the step with more of its fields; nothing is changed in place. The requests themselves may change
while the step runs, so everything that is needed after the launch is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attention import CommonAttentionMetadata
from model_runner.step.graph_sizes import GraphShape
from model_runner.step.logprobs import PromptSpan
from model_runner.step.request import Request, ScheduledRequest
from ubatch import ForwardMode
from ubatch.wrapping import DecidedStep

_LATER: Any = None
"""The value of a field that is filled later."""


@dataclass(frozen=True, kw_only=True)
class Step(DecidedStep):
    """One step of one rank.

    Attributes, scheduled:
        shares: the requests' shares, in order; empty on an idle rank.
        mode: decode, prefill, mixed, target-verify or idle.
        query_lens: tokens of each request in this step, drafts included.
        prefix_lens: tokens of each request that were in the KV cache before the step.
        delay_sampling: the sampling of some request depends on tokens that may still be pending.

    Attributes, batched:
        input_ids: `[T]` int64; pending tokens are looked up (`FutureMap`) before the model runs.
        positions: `[T]` int64, each token's position in its request; in a tree of drafts, the position if its path is
            accepted.
        metadata: for attention.
        logits_rows: `[S]` int64, indices of the sampled rows: the last token of every share that reaches the end of its
            request's tokens; in a verify batch all rows.
        future_places: `[S]` int64, row + 1 of the sampled requests; empty in a verify batch, whose tokens the host must
            read before the next step.
        lengths: tokens of every request when the batch was built.
        rows_per_share: number of `logits_rows` of each share.
        logits_rows_cpu: `logits_rows` on the host.
        future_owners: (request, index of the new token in it, row) of `future_places`.
        pending: (request, index of the token in it, row) of every pending token.
        prompt_spans: the parts of prompts in this step that need prompt log-probabilities.
        late_reads: returns (reader, writer) pairs of requests that must be in one lane, see
            `attention.reads_of_later_writes`. It is slow, and called only if the batch would be split.

    Attributes, agreed, with `decision`, `slices` and `schedule` of `DecidedStep`:
        graph: the graph that all ranks replay; None if the step runs eagerly.

    Planned are `calls` and `contexts` of `DecidedStep`.
    """

    shares: tuple[ScheduledRequest, ...]
    query_lens: Sequence[int]
    prefix_lens: Sequence[int] = ()
    delay_sampling: bool = False

    input_ids: Tensor = _LATER
    positions: Tensor = _LATER
    metadata: CommonAttentionMetadata = _LATER
    logits_rows: Tensor = _LATER
    future_places: Tensor = _LATER
    lengths: tuple[int, ...] = ()
    rows_per_share: tuple[int, ...] = ()
    logits_rows_cpu: tuple[int, ...] = ()
    future_owners: tuple[tuple[Request, int, int], ...] = ()
    pending: tuple[tuple[Request, int, int], ...] = ()
    prompt_spans: tuple[PromptSpan, ...] = ()
    late_reads: Callable[[], Sequence[tuple[int, int]]] = tuple

    graph: GraphShape | None = None

    @classmethod
    def of(cls, shares: Sequence[ScheduledRequest], *, delay_sampling: bool = False) -> Step:
        """A step that runs these shares of requests, as the requests are now."""
        done = [share.request.num_computed_tokens for share in shares]
        drafts = [share.drafts for share in shares]
        lens = [share.num_tokens + len(share.drafts) for share in shares]
        decodes = [length == 1 and before > 0 for length, before in zip(lens, done, strict=True)]
        if not shares:
            mode = ForwardMode.IDLE
        elif any(drafts):
            mode = ForwardMode.TARGET_VERIFY
        elif all(decodes):
            mode = ForwardMode.DECODE
        else:
            mode = ForwardMode.MIXED if any(decodes) else ForwardMode.PREFILL
        return cls(shares=tuple(shares), mode=mode, query_lens=lens, prefix_lens=done, delay_sampling=delay_sampling)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return sum(self.query_lens)

    @property
    def all_idle(self) -> bool:
        """No rank has a token: nothing runs."""
        return not any(map(any, self.decision.tokens))

    @property
    def needed_rows(self) -> tuple[int, ...] | None:
        """Rows whose hidden states are read, if these are few; None for all. Prompts that are scored read theirs."""
        few = self.mode is not ForwardMode.DECODE and len(self.logits_rows_cpu) < self.num_tokens
        return self.logits_rows_cpu if few and not self.prompt_spans else None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests that do not decode; 0 in a step that verifies drafts."""
        if self.mode not in (ForwardMode.PREFILL, ForwardMode.MIXED):
            return 0
        decodes = [length == 1 and done > 0 for length, done in zip(self.query_lens, self.prefix_lens, strict=False)]
        return sum(self.query_lens) - sum(decodes)
