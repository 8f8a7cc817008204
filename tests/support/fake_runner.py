"""A runner without a model: its KV cache holds which sequence every slot belongs to, and checks it at every read.

The next token is a function of the tokens so far, as the *cache* has them: a slot keeps the position and a hash of all
tokens up to there. A step that reads a slot which was freed, shared too early, or overwritten, finds another hash than
its request's tokens give, and fails. Steps run when they are launched, as on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from attention import BlockAllocator, RequestToTokenTable
from model_runner import (
    PENDING_TOKEN,
    FinishReason,
    Proposer,
    SamplingParams,
    ScheduledRequest,
    Step,
    StepOutput,
    TokenLogprobs,
)
from model_runner.speculation.ngram import NgramProposer
from serving.requests import RequestInput, RequestOutput
from serving.scheduler import Scheduler, SchedulerConfig
from serving.scheduler.request import shares_of
from ubatch import Decision

EOS = 0
VOCAB = 50
NextToken = Callable[[Sequence[int]], int]


def hashed(tokens: Sequence[int]) -> int:
    """A token that depends on all before it; now and then the end-of-sequence token."""
    value = len(tokens)
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
    return value % VOCAB


def repeating(tokens: Sequence[int]) -> int:
    """A token that depends on the last two only, so that outputs run into cycles which can be predicted."""
    a, b = ([1, *tokens])[-2:]
    return (a * 7 + b * 3) % 11 + 1


def expected(
    prompt: Sequence[int], params: SamplingParams, *, limit: int = 1 << 30, next_token: NextToken = hashed
) -> list[int]:
    """The output of a request, without any scheduler.

    Args:
        prompt: its tokens.
        params: `max_tokens`, `min_tokens` and the stop tokens count.
        limit: most tokens of prompt and output.
        next_token: the runner's.
    """
    tokens = list(prompt)
    ends = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in ends and len(tokens) - len(prompt) >= params.min_tokens:
            break
    return tokens[len(prompt) :]


@dataclass
class FakePending:
    """A step that has run. `tokens` is filled by `sample`."""

    runner: FakeRunner
    sequences: list[tuple[ScheduledRequest, int, list[int]]]
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...]
    tokens: list[tuple[int, ...]] | None = None
    num_prefills: int = 0

    def sample(self) -> None:
        assert self.tokens is None, "sampled twice"
        self.tokens = [self._sample(*sequence) for sequence in self.sequences]

    def _sample(self, share: ScheduledRequest, row: int, tokens: list[int]) -> tuple[int, ...]:
        if not tokens:
            return ()
        params = share.request.params
        if params.needs_history:
            known = share.request.token_ids[: len(tokens)]
            assert known == tokens, f"history {known} when it is sampled, {tokens} in the cache"
        sampled: list[int] = []
        path: list[int] = []  # nodes of the drafts that are right
        while True:
            sampled.append(self.runner.next_token([*tokens, *sampled]))
            node = path[-1] if path else 0
            children = [n for n, parent in enumerate(parents_of(share), 1) if parent == node]
            right = [child for child in children if share.drafts[child - 1] == sampled[-1]]
            if not right:
                break
            path.append(right[0])
        if path:
            self.runner.keep(share, row, path)
        if not share.drafts:
            self.runner.future[row] = sampled[-1]
        return tuple(sampled)

    def result(self) -> StepOutput:
        assert self.tokens is not None, "result before sample"
        logprobs = [
            tuple(TokenLogprobs(token, -1.0, 1, ()) for token in tokens)
            if share.request.params.logprobs is not None
            else ()
            for (share, _, _), tokens in zip(self.sequences, self.tokens, strict=True)
        ]
        num_tokens = sum(share.num_tokens + len(share.drafts) for share, _, _ in self.sequences)
        decision = Decision(False, None, None, ((num_tokens,),), prefill_tokens=(self.num_prefills,))
        return StepOutput(tuple(self.tokens), tuple(logprobs), self.logprobs, decision, all_idle=not self.sequences)


def parents_of(share: ScheduledRequest) -> Sequence[int]:
    """Of each draft the node before it: 0 is the last known token, `j + 1` draft `j`."""
    return range(len(share.drafts)) if share.parents is None else share.parents


class FakeRunner:
    """An executor for `Scheduler`, with its allocator and table.

    Args:
        num_blocks: of the KV cache.
        block_size: tokens per block.
        max_num_seqs: rows of the table.
        max_model_len: tokens of a row.
        next_token: from the tokens so far to the next.
        checked: look at the KV cache; without it only tokens are made (to measure the scheduler).
        num_snapshots: not 0 for a model with recurrent states, which are checked as keys and values are.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 16,
        max_model_len: int = 128,
        next_token: NextToken = hashed,
        checked: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        # (tokens that it has seen, hash of these, how many more it may take over from a verify step)
        self.states: list[tuple[int, int, int]] = [(0, 0, 0)] * max_num_seqs
        self.snapshots: list[tuple[int, int, int]] = [(0, 0, 0)] * num_snapshots
        self.num_restored = 0
        self.allocator = BlockAllocator(num_blocks)
        self.table = RequestToTokenTable(max_num_seqs, -(-max_model_len // block_size), block_size)
        self.next_token = next_token
        self.future = [PENDING_TOKEN] * max_num_seqs
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.checked = checked
        self.steps: list[list[tuple[str, int, int]]] = []
        """Of every step that was not empty: (request, tokens, drafts) of each share."""

    def launch(self, shares: Sequence[ScheduledRequest]) -> FakePending:
        prefills = sum(s.num_tokens for s in shares if s.num_tokens > 1 or not s.request.num_computed_tokens)
        if not self.checked:
            ran = [(share, share.request.row or 0, [1]) for share in shares]
            return FakePending(self, ran, ((),) * len(shares), num_prefills=prefills)
        if shares:
            self.steps.append([(str(s.request.request_id), s.num_tokens, len(s.drafts)) for s in shares])
        assert len({(len(s.drafts), s.num_tokens) for s in shares}) == 1 or not any(s.drafts for s in shares)
        logprobs = tuple(self._prompt_logprobs(share) for share in shares)
        for share in shares:
            if share.restore is not None:
                self.states[share.request.row or 0] = self.snapshots[share.restore]
                self.num_restored += 1
        ran = [self._run(share) for share in shares]
        for share in shares:
            if share.keep is not None:
                self.snapshots[share.keep] = self.states[share.request.row or 0]
                assert not share.drafts, "this state has not seen the drafts that are right"
        return FakePending(self, ran, logprobs, num_prefills=prefills)

    def _run(self, share: ScheduledRequest) -> tuple[ScheduledRequest, int, list[int]]:
        """Read what is cached, write what is new; returns the tokens to sample after, or none."""
        request = share.request
        assert request.row is not None
        tokens = list(request.token_ids)
        if tokens[-1] == PENDING_TOKEN:
            tokens[-1] = self.future[request.row]
        assert PENDING_TOKEN not in tokens, "only the last token may be pending"
        start, stop = request.num_computed_tokens, request.num_computed_tokens + share.num_tokens
        assert 0 < share.num_tokens <= len(tokens) - start
        size = self.table.block_size
        blocks = self.table.blocks(request.row)
        value = 0
        values = [0]  # the hash of so many tokens
        for place, token in enumerate(tokens[:stop]):
            value = hash((value, place, token))
            slot = blocks[place // size] * size + place % size
            if place < start:
                assert self.slots[slot] == (place, value), f"{request.request_id}: the KV of token {place} is another's"
            else:
                self.slots[slot] = (place, value)
            values.append(value)
        if self.snapshots:
            seen, state, more = self.states[request.row] if start else (0, 0, 0)
            assert 0 <= start - seen <= more, f"{request.request_id}: its state has seen {seen} tokens, not {start}"
            assert state == values[seen], f"{request.request_id}: the state after {seen} tokens is another's"
            self.states[request.row] = (
                (start, values[start], 1 + len(share.drafts)) if share.drafts else (stop, value, 0)
            )
        path = [(stop - 1, value)]  # of every node its place in the sequence, and the hash of its path
        for node, (token, parent) in enumerate(zip(share.drafts, parents_of(share), strict=True), 1):
            assert parent < node, "a draft comes before its parent"
            place = path[parent][0] + 1
            path.append((place, hash((path[parent][1], place, token))))
            slot = stop - 1 + node
            self.slots[blocks[slot // size] * size + slot % size] = path[node]
        return share, request.row, tokens if stop == len(tokens) else []

    def keep(self, share: ScheduledRequest, row: int, path: Sequence[int]) -> None:
        """Move the KV of the drafts that were right to the places of their tokens, as the runner does with a tree."""
        size, root = self.table.block_size, share.request.num_computed_tokens
        blocks = self.table.blocks(row)
        for offset, node in enumerate(path, 1):
            old, new = root + node, root + offset
            self.slots[blocks[new // size] * size + new % size] = self.slots[blocks[old // size] * size + old % size]

    @staticmethod
    def _prompt_logprobs(share: ScheduledRequest) -> tuple[TokenLogprobs | None, ...]:
        request = share.request
        if request.params.prompt_logprobs is None:
            return ()
        start = request.num_computed_tokens
        places = range(start, min(start + share.num_tokens, request.num_prompt_tokens))
        return tuple(TokenLogprobs(request.token_ids[p], -1.0, 1, ()) if p else None for p in places)


Launched = tuple[Step, FakePending]


@dataclass
class Loop:
    """Scheduler and fake runner, in the order of an engine: plain, or overlapped with results one step late.

    `run` compares what every request has given with what it would give alone.
    """

    scheduler: Scheduler
    runner: FakeRunner
    limit: int
    overlapped: bool = False
    requests: dict[str, RequestInput] = field(default_factory=dict)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    _flight: Launched | None = None

    def add(
        self, request_id: str, prompt: Sequence[int], *, priority: int = 0, group: str = "", **params: object
    ) -> None:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        request = RequestInput(request_id, prompt, sampling, priority, group)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        found = self.scheduler.abort(request_id)
        self.aborted |= {request_id} if found else set()
        return found

    def step(self) -> Step:
        step, pending = launched = self.launch()
        if self.overlapped:
            self._process()
        if step.delay_sampling:
            pending.sample()
        self._flight = launched
        if not self.overlapped:
            self._process()
        return step

    def launch(self) -> Launched:
        """Plan a step, and launch it."""
        step = self.scheduler.schedule()
        assert step.shares or self._flight or not self.scheduler.has_work, "nothing runs although somebody waits"
        pending = self.runner.launch(step.shares)
        self.scheduler.advance(step)
        if not step.delay_sampling:
            pending.sample()
        return step, pending

    def process(self, launched: Launched) -> list[RequestOutput]:
        """Process a step's result."""
        step, pending = launched
        outputs = self.scheduler.process(step, pending.result())
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def run(self, most_steps: int = 10_000) -> None:
        """Until nothing is left; then the books balance, and every request has got its own tokens."""
        while self.scheduler.has_work or self._flight is not None:
            most_steps -= 1
            assert most_steps > 0, "it does not come to an end"
            self.step()
            if not self.scheduler.has_work:
                self._process()
        self.scheduler.check(idle=True)
        for name in self.requests if self.runner.checked else ():
            self._check_outputs(name)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def _process(self) -> None:
        launched, self._flight = self._flight, None
        if launched is not None:
            self.process(launched)

    def _check_outputs(self, name: str) -> None:
        request, params = self.requests[name], self.requests[name].params
        wanted = expected(request.token_ids, params, limit=self.limit, next_token=self.runner.next_token)
        outputs = self.outputs.get(name, [])
        if name in self.aborted:
            got = self.tokens(name) if outputs else []
            assert got == wanted[: len(got)], name
            return
        assert self.tokens(name) == wanted, name
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        stopped = outputs[-1].stop_token is not None
        assert outputs[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        scored = [one.token for output in outputs for one in output.logprobs]
        assert scored == ([] if params.logprobs is None else wanted)
        prompt_logprobs = [output.prompt_logprobs for output in outputs]
        assert prompt_logprobs[1:] == [None] * (len(outputs) - 1), "they come once, and with the first token"
        if params.prompt_logprobs is not None:
            assert prompt_logprobs[0] is not None
            assert [one and one.token for one in prompt_logprobs[0]] == [None, *request.token_ids[1:]]


def make_loop(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 16,
    next_token: NextToken = hashed,
    overlapped: bool = False,
    checked: bool = True,
    proposer: Proposer | None = None,
    prompt_lookup_min: int = 2,
    clock: Callable[[], float] = time.monotonic,
    **config: object,
) -> Loop:
    """A scheduler over a fake runner. What is not named here is `SchedulerConfig`'s; drafts are n-grams by default."""
    runner = FakeRunner(
        num_blocks,
        block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        next_token=next_token,
        checked=checked,
        num_snapshots=int(str(config.get("num_state_snapshots", 0))),
    )
    settings = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, **config)  # type: ignore[arg-type]
    if proposer is None and settings.num_speculative_tokens:
        proposer = NgramProposer(prompt_lookup_min, 4)
    scheduler = Scheduler(
        settings, runner.allocator, runner.table, eos_token_ids=[EOS], vocab_size=VOCAB, proposer=proposer, clock=clock
    )
    limit = min(max_model_len, num_blocks * block_size + 1)
    return Loop(scheduler, runner, limit, overlapped)


def shares(step: Step) -> list[tuple[str, int]]:
    """Who runs in a step, with how many tokens."""
    return [(str(share.request.request_id), share.num_tokens) for share in step.shares]


def admitted(step: Step) -> list[str]:
    """Whose prompts run in a step."""
    return [share.request.name for share in shares_of(step) if share.prefill]


def prompt_of(length: int, start: int = 1) -> list[int]:
    """A prompt without repetitions."""
    return [(start + 7 * place) % 49 + 1 for place in range(length)]


def be_optimistic(loop: Loop) -> Loop:
    """Keep no KV for outputs: as many requests as can be are admitted, and many retracted."""
    loop.scheduler._prefills.ratio = SimpleNamespace(  # type: ignore[assignment]
        decay=lambda: None, reset=lambda: None, estimate=lambda running: None, tokens=lambda requests: 0
    )
    return loop
