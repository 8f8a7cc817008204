"""The scheduler: plans which tokens of which requests each step runs; admits, retracts and ends requests.

    add        put a new request into the queue
    schedule   plan a step: running decodes, the rest of a split prompt, new prompts, up to the limits of a step
    advance    the step was launched: count its tokens as computed
    process    the step has ended: make outputs, end requests, put written pages into the prefix cache

In the plain loop these run one after the other. In the overlapped loop `schedule` and `advance` of step N + 1 run
before `process` of step N. So a token may be known to the device only, a request of step N + 1 may have ended in step
N, and a result may belong to a request that was aborted or retracted meanwhile.

KV is reserved for a whole prompt at its admission, and then for one token at a time. If there is no block for a token,
requests are retracted: those with the fewest output tokens first, then those with the longest prompts (with policy
`priority`, the lowest priority before all). One request always stays, and it always fits: a request ends with `LENGTH`
when its tokens fill its row or the whole cache, however many others run. So outputs do not depend on the load.

Source: SGLang's scheduler; vLLM's names.
"""

import time
from collections.abc import Callable, Sequence

from attention import BlockAllocator, KVCacheError, KVCacheExhausted, RequestToTokenTable
from model_runner import (
    FAULTS,
    PENDING_TOKEN,
    FinishReason,
    Proposer,
    RequestError,
    Step,
    StepOutput,
    TokenGrammar,
    TokenLogprobs,
)
from serving.requests import DraftCounts, EngineStatistics, RequestInput, RequestOutput, SchedulerTotals, StartTimes
from serving.scheduler.config import SchedulerConfig, SchedulingPolicy
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.mixed_steps import MixedSteps
from serving.scheduler.prefills import Prefill, Prefills, choose_victim
from serving.scheduler.request import TrackedRequest, TrackedShare, check_input, plan_step, shares_of
from serving.scheduler.speculation import Speculation
from ubatch import ForwardMode, UBatchError

_NO_DRAFTS = DraftCounts()


class Scheduler:
    """Plans the steps of one data-parallel rank. Not thread-safe.

    Args:
        allocator: allocates blocks of the runner's KV cache; only the scheduler uses it.
        proposer: proposes draft tokens; needed if the config asks for drafts.
        own_ranks: see `MixedSteps`.
        clock: returns seconds; tests replace it.

    Raises:
        ConfigError: the config does not fit the proposer.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        table: RequestToTokenTable,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        proposer: Proposer | None = None,
        own_ranks: range = range(1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._by_priority = config.policy is SchedulingPolicy.PRIORITY
        self._mixed_steps = MixedSteps(
            config.max_prefill_tokens_per_mixed_step, table.block_size, config.max_num_batched_tokens, own_ranks
        )
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        snapshots = config.num_state_snapshots
        self.kv = KVManager(allocator, table, prefix_caching=config.enable_prefix_caching, num_snapshots=snapshots)
        self._requests: dict[str, TrackedRequest] = {}  # all unfinished requests
        self._counts = SchedulerTotals()
        self._prefills = Prefills(config, self.kv, self._counts, clock)
        self._running, self._waiting = self._prefills.running, self._prefills.waiting
        self._speculation = Speculation(config, self.kv, min(config.max_model_len, self.kv.max_tokens), proposer)
        self._num_arrived = 0

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, without KV."""
        return len(self._waiting)

    @property
    def running(self) -> list[str]:
        """Ids of the requests that have KV blocks."""
        return list(self._running)

    @property
    def requests(self) -> list[str]:
        """Ids of those that run, and of those that wait."""
        return list(self._requests)

    @property
    def drafts(self) -> bool:
        """Whether `schedule` may propose draft tokens."""
        return self._config.num_speculative_tokens > 0

    @property
    def drafting(self) -> bool:
        """Whether drafts are being made for those that run, or could not be made."""
        return self._speculation.drafting

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, given: RequestInput, grammar: TokenGrammar | None = None) -> None:
        """Put a new request into the queue.

        Args:
            grammar: made from `params.grammar`, for this request only.

        Raises:
            RequestError, KVCacheExhausted: see `check_new`; or it has the text of a grammar, but no grammar; or it has
                tokens from another engine, and no room for more.
        """
        self.check_new(given)
        if (grammar is None) is not (given.params.grammar is None):
            message = f"request {given.request_id!r} needs a grammar if it has the text of one, and none otherwise."
            raise RequestError(message, param="grammar")
        asked = len(given.token_ids) + given.params.max_tokens
        # The last token of an output is never computed, so it needs no KV.
        limit = min(asked, self._config.max_model_len, self.kv.max_tokens + 1)
        known = len(given.token_ids) + len(given.generated)
        if known >= limit:
            raise KVCacheExhausted(
                f"request {given.request_id!r} cannot go on on another rank: it has {known} tokens, and the KV cache "
                f"there holds {limit - 1}."
            )
        request = TrackedRequest(
            given.request_id,
            list(given.token_ids),
            given.params,
            priority=given.priority,
            arrival=self._num_arrived,
            group=given.group or given.request_id,
            arrived_at=self._clock(),
            limit=limit,
            ends=frozenset(given.params.ending_tokens(self._eos_token_ids)),
            num_cached_tokens=0 if given.generated else None,  # its first engine has counted them
            grammar=grammar,
        )
        request.token_ids += given.generated
        self._num_arrived += 1
        self._requests[request.name] = request
        self._waiting.push(request)

    def check_new(self, given: RequestInput) -> None:
        """Refuse a request that `add` would refuse.

        Raises:
            RequestError: it can never be served: the prompt is empty, has a token outside the vocabulary or leaves no
                room for an output, the parameters forbid every first token, or the id is in use.
            KVCacheExhausted: its prompt alone does not fit the KV cache.
        """
        if given.request_id in self._requests:
            raise RequestError(f"request {given.request_id!r} is alive already; give every request its own id.")
        check_input(
            given,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._config.max_model_len,
            max_kv_tokens=self.kv.max_tokens,
        )

    def abort(self, request_id: str) -> bool:
        """End a request now and free its KV; it gets no more outputs. Returns False if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Plan a step; it has no shares if nothing can run now."""
        if not self._requests:
            self._prefills.ratio.reset()
            return Step.of(())
        budget = self._config.max_num_batched_tokens
        prefills: list[Prefill] = []
        decodes: list[TrackedRequest] = []
        if self._config.prefill_first:
            prefills = self._prefills.plan(budget)
            if not prefills:
                decodes, _ = self._reserve_decodes()
        else:
            decodes, pressed = self._reserve_decodes()
            if not pressed:
                prefills = self._prefills.plan(self._mixed_steps.room(budget - len(decodes), len(decodes)))
        if decodes:
            self._prefills.ratio.decay()
        suspects = [request for request in decodes if request.suspect]
        if decodes and not prefills and not suspects and (step := self._speculation.plan(decodes)) is not None:
            return step
        return self.kv.plan_snapshots(plan_step(decodes, prefills))

    def advance(self, step: Step) -> None:
        """The step was launched: count its tokens as computed, for the planning of later steps."""
        self._mixed_steps.launched()
        verifies = step.mode is ForwardMode.TARGET_VERIFY
        for share in shares_of(step):
            request = share.request
            if verifies:
                request.verifying = True
                continue
            request.num_computed_tokens += share.num_tokens
            if share.ends:
                request.token_ids.append(PENDING_TOKEN)
                request.prefilling = False

    def process(self, step: Step, output: StepOutput) -> list[RequestOutput]:
        """Process a launched step's result; must be called in the order of the steps.

        Returns:
            One output for every request that got a token or ended.
        """
        if len(output.tokens) != len(step.shares):
            raise UBatchError(f"a step of {len(step.shares)} shares gave tokens for {len(output.tokens)}.")
        self._mixed_steps.processed(output.decision)
        outputs = []
        for index, share in enumerate(shares_of(step)):
            corrupted, finished = index in output.corrupted, share.request.finished
            if share.prefill and not corrupted and not finished:
                self._take_prefill(share, step.prefix_lens[index], output.prompt_logprobs[index])
            if (share.ends or corrupted) and not finished:
                got = self._take_tokens(step, index, share, output)
                if got.token_ids or got.finish_reason is not None:
                    outputs.append(got)
            if share.keep is not None:
                self.kv.settle(share, step.prefix_lens[index] + share.num_tokens, good=not corrupted and not finished)
        return outputs

    def statistics(self) -> EngineStatistics:
        """The scheduler's part of the statistics: its state and totals."""
        return EngineStatistics(
            num_running=len(self._running), num_waiting=len(self._waiting), kv_usage=self.kv.usage, **vars(self._counts)
        )

    def check(self, *, idle: bool = False) -> None:
        """Check the conservation law of KV blocks: free + cached + owned by running requests == total.

        Args:
            idle: also require that no request is unfinished and nothing is locked.
        """
        self.kv.check(self._running.values(), idle=idle)
        if idle and self._requests:
            raise KVCacheError(f"{len(self._requests)} requests are alive: {', '.join(list(self._requests)[:3])}, ...")

    # -- decodes ------------------------------------------------------------------------------------------------

    def _reserve_decodes(self) -> tuple[list[TrackedRequest], bool]:
        """Reserve a block per decode, retracting if blocks are short; returns (decodes, whether blocks were short)."""
        ready = [request for request in self._running.values() if request.decodes]
        size = self.kv.block_size
        # Each of these lacks a block for its last token only.
        short = [request for request in ready if len(request.token_ids) > request.num_kv_blocks * size]
        pressed = False
        while len(short) > self.kv.num_available:
            pressed = True
            candidates = [r for r in self._running.values() if r.decodes or r.prefilling or r.verifying]
            if len(candidates) == 1:  # it fits once the requests that end in a step in flight are processed
                return [], pressed
            victim = choose_victim(candidates, by_priority=self._by_priority)
            self._retract(victim)
            ready = [request for request in ready if request is not victim]
            short = [request for request in short if request is not victim]
        self.kv.reserve_block_each(short)
        return ready, pressed

    def _retract(self, request: TrackedRequest) -> None:
        """Free a request's KV and put it back into the queue. Its written pages stay in the prefix cache, evictable."""
        self.kv.release(request)
        self._speculation.forget(request)
        self._prefills.leave(request)
        request.incarnation += 1
        request.prefilling = False
        request.retracted = True
        self._waiting.push(request)
        self._counts.preemptions += 1
        self._prefills.ratio.estimate(self._running.values())

    # -- results ------------------------------------------------------------------------------------------------

    def _take_prefill(self, share: TrackedShare, start: int, prompt_logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Part of a prompt was computed, from index `start`: put its written pages into the prefix cache."""
        request = share.request
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += prompt_logprobs
        if share.incarnation == request.incarnation:
            request.num_written_tokens = start + share.num_tokens
            self.kv.cache_written(request)
            self._prefills.sharing.wrote(request)

    def _take_tokens(self, step: Step, index: int, share: TrackedShare, output: StepOutput) -> RequestOutput:
        """Add the tokens of a step to its request: they replace the pending one, or are appended after a verify step.

        A request with values that are not finite ends with an error. In a verify step a draft may be the cause (masked
        attention multiplies a NaN by 0), so the request first runs a step without drafts. A request whose parameters
        leave no token ends in either kind of step, as that does not depend on drafts.
        """
        request, tokens, corrupted = share.request, output.tokens[index], index in output.corrupted
        verified = step.mode is ForwardMode.TARGET_VERIFY
        place = step.prefix_lens[index] + share.num_tokens
        count, reason = request.ending(tokens, place)
        request.suspect = corrupted and verified
        stuck = index in output.out_of_tokens
        if reason is None and (stuck or (corrupted and not verified)):
            reason = request.stuck_reason if stuck else FinishReason.ERROR
            self._counts.corrupted_requests += corrupted
        drafts = _NO_DRAFTS
        if verified:
            drafts = share.drafts_right(min(len(tokens) - (not corrupted and not stuck), count))
            request.verifying = False
            request.token_ids += tokens[:count]
            self._counts.verified(drafts)
        elif tokens:
            request.token_ids[place] = tokens[0]
        if share.incarnation == request.incarnation and reason not in FAULTS:
            request.num_written_tokens = place + count - 1
            if verified:
                request.num_computed_tokens = request.num_written_tokens
        self._counts.generation_tokens += count
        times = None
        if place == request.num_prompt_tokens:
            self._counts.prompt_tokens += place
            self._counts.prompt_tokens_cached += request.num_cached_tokens or 0
            times = StartTimes(request.started_at - request.arrived_at, self._clock() - request.started_at)
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if reason is not None:
            del request.token_ids[max(place + count, request.num_prompt_tokens) :]  # a later step's pending token
            self._end(request, keep=reason is not FinishReason.ERROR)
        return RequestOutput(
            request.name,
            tokens[:count],
            logprobs=output.logprobs[index][:count] if request.params.logprobs is not None else (),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=tokens[count - 1] if reason is FinishReason.STOP else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            drafts=drafts,
            times=times,
        )

    # -- the rest -----------------------------------------------------------------------------------------------

    def _end(self, request: TrackedRequest, *, keep: bool = True) -> None:
        request.finished = True
        self._speculation.forget(request)
        del self._requests[request.name]
        if request.row is None:
            self._waiting.remove(request)
        else:
            self.kv.release(request, keep=keep)
        self._prefills.leave(request)
