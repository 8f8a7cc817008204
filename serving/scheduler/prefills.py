"""Plans the prompts of a step: those that paused at a checkpoint, the split one, then new ones, which are admitted.

Requests are admitted in the policy's order until one does not fit; later ones do not overtake it. KV is reserved for a
whole prompt at its admission, also if its tokens are computed in several steps.

*Common prefixes.* Requests with a common prefix compute it once: the prefix cache only has pages that are written, so
equal prompts that arrive together, such as those of `n` > 1, would all be computed in the same step. The others wait
until the first one has written it. A request waits only for a running one, so no request waits forever.

*Retraction.* Admission up to the last block would force a retraction at the next step; keeping blocks for the longest
possible output of every request would leave most blocks idle. So a share of the remaining output is kept free: the
new-token ratio. It falls with every decode step, and is estimated again from the tokens really generated when a request
is retracted. Source: SGLang's new-token ratio.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from serving.requests import SchedulerTotals
from serving.scheduler.config import SchedulerConfig, SchedulingPolicy
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.radix_cache import PrefixMatch, common_prefix
from serving.scheduler.request import TrackedRequest
from serving.scheduler.waiting import WaitingQueue

# Limits of the requests that one step looks at in a long queue; the next step looks further.
_MAX_OWN = 128  # requests skipped because they are in the split prompt's group: as many as `lpm` sorts
_MAX_TOLD = 256  # requests newly found to wait for a prefix that another request computes
_WORTH_WAITING = 32  # least shared tokens (or one page, if larger): below, the delay of a step costs more than it saves

_FIRST_RATIO = 0.7
_LEAST_RATIO = 0.14 * _FIRST_RATIO
_RATIO_STEPS = 600  # decode steps in which the ratio falls from `_FIRST_RATIO` to `_LEAST_RATIO`
_AHEAD = 20  # tokens that each request should have room for after a retraction
_MOST_REMAINING = 4096  # most remaining tokens counted per request: few outputs reach a large `max_tokens`

Prefill = tuple[TrackedRequest, int]
"""A request, and the tokens of its prompt that the step runs."""


class Prefills:
    """The requests that wait, and those whose prompts run.

    Args:
        kv: reserves the KV of admitted requests.
        totals: counts what admitted requests found in the prefix cache.
        clock: returns seconds, for `TrackedRequest.started_at`.

    Attributes:
        waiting: the queue.
        running: requests with a row, in the order of their admission.
        split: the request whose prompt is split over several steps; None if there is none.
        ratio: how much KV is kept free for the output of running requests.
        sharing: the requests that wait for a prefix that another one computes.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, totals: SchedulerTotals, clock: Callable[[], float]
    ) -> None:
        self._config, self._kv, self._totals, self._clock = config, kv, totals, clock
        self._by_priority = config.policy is SchedulingPolicy.PRIORITY
        self.waiting = WaitingQueue(config.policy, lambda request: len(kv.lookup(request).blocks))
        self.running: dict[str, TrackedRequest] = {}
        self.split: TrackedRequest | None = None
        self.ratio = NewTokenRatio()
        self.sharing = PrefixWaits(kv.block_size, snapshots=config.num_state_snapshots > 0)
        self._paused: dict[str, TrackedRequest] = {}  # prompts cut at a checkpoint; each goes on in the next step
        self._others_had_last = True  # in turns: other prompts had the last step

    def plan(self, budget: int) -> list[Prefill]:
        """The prompts that run in a step of at most `budget` of their tokens."""
        resumed: list[Prefill] = []
        for request in tuple(self._paused.values()):
            num_tokens = request.next_stop - request.num_computed_tokens
            if num_tokens <= budget:
                resumed.append((request, num_tokens))
                budget -= num_tokens
                self._run_to_stop(request)
            elif self.split is None:
                self.split = self._paused.pop(request.name)
        return resumed + (self._admit(budget) if self.split is None else self._plan_split(self.split, budget))

    def leave(self, request: TrackedRequest) -> None:
        """A request ended or was retracted: it runs no longer."""
        request.decode_share = None
        self.running.pop(request.name, None)
        self.sharing.drop(request)
        self._paused.pop(request.name, None)
        if self.split is request:
            self.split = None

    def _run_to_stop(self, request: TrackedRequest) -> None:
        """The step runs a request up to its next stop; it pauses there, if that is not its end."""
        self._paused.pop(request.name, None)
        if request.next_stop < len(request.token_ids):
            self._paused[request.name] = request

    def _plan_split(self, request: TrackedRequest, budget: int) -> list[Prefill]:
        """The split prompt, then new ones. Only one prompt is split at a time. While it needs more steps, it leaves
        half of each to whole prompts of other groups; if a step has no room for two pages, they take turns.
        """
        start, missing = request.num_computed_tokens, request.next_stop - request.num_computed_tokens
        if missing <= budget:
            self.split = None
            self._run_to_stop(request)
            return [(request, missing), *self._admit(budget - missing)]
        page = self._kv.block_size
        share = budget // 2
        if budget < 2 * page:  # no room for both: in turns
            share = 0 if self._others_had_last or budget < page else budget
        others = self._admit(share, beside=request)
        num_tokens = self._cut(start, missing, budget - sum(count for _, count in others))
        if budget >= page:
            self._others_had_last = bool(others) and not num_tokens
        return [(request, num_tokens), *others] if num_tokens else others

    def _admit(self, budget: int, *, beside: TrackedRequest | None = None) -> list[Prefill]:
        """Admit requests until one does not fit.

        Args:
            budget: most tokens to run.
            beside: the split prompt, if it needs more steps: then only whole prompts of other groups are admitted.
        """
        admitted: list[Prefill] = []
        rows = min(self._config.max_num_seqs - len(self.running), self._kv.num_free_rows)
        if budget < 1 or rows < 1 or not self.waiting:
            return admitted
        kept = self.ratio.tokens(self.running.values())
        told_to_wait = 0
        for request in self.waiting.in_order() if beside is None else self._beside(beside):
            if budget < 1 or len(admitted) == rows or not request.tokens_known or told_to_wait == _MAX_TOLD:
                break
            if self.sharing.still_waits(request):
                continue
            match = self._kv.lookup(request)
            start = len(match.blocks) * self._kv.block_size
            if self._kv.prefix_caching and self.sharing.should_wait(request, start):
                told_to_wait += 1
                continue
            stops = self._kv.checkpoints(request, match) if self._config.enable_chunked_prefill else ()
            missing = (stops[0] if stops else len(request.token_ids)) - start
            num_tokens = self._cut(start, missing, budget)
            whole = num_tokens == missing
            kept += self.ratio.tokens((request,))
            if num_tokens == 0 or (beside is not None and not whole) or not self._fits(request, match, kept):
                break
            self._start(request, match)
            request.checkpoints = stops
            admitted.append((request, num_tokens))
            budget -= num_tokens
            if not whole:
                self.split = request
                break
            self._run_to_stop(request)
        return admitted

    def _beside(self, split: TrackedRequest) -> Iterator[TrackedRequest]:
        """The waiting requests that may run beside a split prompt, in the policy's order."""
        own = 0
        for request in self.waiting.in_order():
            if self._by_priority and request.priority > split.priority:
                return
            if request.group != split.group or not request.tokens_known:  # no other may overtake the latter
                yield request
                continue
            own += not request.retracted
            if own > _MAX_OWN:
                return

    def _cut(self, start: int, wanted: int, budget: int) -> int:
        """How many of `wanted` tokens from index `start` a step runs within `budget`: all, or up to a page's end."""
        if wanted <= budget:
            return wanted
        if not self._config.enable_chunked_prefill:
            return 0
        return max(0, (start + budget) // self._kv.block_size * self._kv.block_size - start)

    def _fits(self, request: TrackedRequest, match: PrefixMatch, kept_tokens: int) -> bool:
        """Whether there are blocks for the whole prompt and, if any request runs, for `kept_tokens` future tokens."""
        needed = self._kv.blocks_for(len(request.token_ids)) - len(match.blocks)
        if self.running:  # else no request could be retracted later
            needed += self._kv.blocks_for(kept_tokens)
        return needed <= self._kv.num_available_beside(match)

    def _start(self, request: TrackedRequest, match: PrefixMatch) -> None:
        """Reserve a request's KV; it runs from now on."""
        self._kv.admit(request, match, len(request.token_ids))
        self.waiting.admit(request)
        self.running[request.name] = request
        self.sharing.start(request)
        request.prefilling, request.retracted = True, False
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            request.started_at = self._clock()
            if self._kv.prefix_caching and request.params.prompt_logprobs is None:
                self._totals.prefix_queries += request.num_prompt_tokens
                self._totals.prefix_hits += request.num_computed_tokens
        if request.params.prompt_logprobs is not None and request.num_output_tokens == 0:
            request.prompt_logprobs = []


class PrefixWaits:
    """The requests that compute prompts now, and those that wait for one of them.

    Args:
        block_size: tokens per page; only whole pages are shared.
        snapshots: what is shared must end with a snapshot, so a request waits for a checkpoint of the other one only.
    """

    def __init__(self, block_size: int, *, snapshots: bool = False) -> None:
        self._block_size = block_size
        self._snapshots = snapshots
        self._worth = max(_WORTH_WAITING, block_size)
        self._writers: dict[str, tuple[TrackedRequest, int]] = {}
        # Waiting request -> (writer, its incarnation, tokens to be written): makes `still_waits` cheap.
        self._waits: dict[str, tuple[TrackedRequest, int, int]] = {}

    def start(self, request: TrackedRequest) -> None:
        """A request was admitted and computes its tokens."""
        self._waits.pop(request.name, None)
        self._writers[request.name] = (request, len(request.token_ids))

    def drop(self, request: TrackedRequest) -> None:
        """A request ended or was retracted."""
        self._waits.pop(request.name, None)
        self._writers.pop(request.name, None)

    def wrote(self, request: TrackedRequest) -> None:
        """A request's step was processed."""
        entry = self._writers.get(request.name)
        if entry is not None and request.num_written_tokens >= entry[1]:
            del self._writers[request.name]

    def still_waits(self, request: TrackedRequest) -> bool:
        """Whether the wait that `should_wait` found still holds; cheap."""
        entry = self._waits.get(request.name)
        if entry is None:
            return False
        writer, incarnation, shared = entry
        if writer.name in self._writers and writer.incarnation == incarnation and writer.num_written_tokens < shared:
            return True
        del self._waits[request.name]
        return False

    def should_wait(self, request: TrackedRequest, num_cached: int) -> bool:
        """Whether a running request computes enough of this prompt beyond its `num_cached` tokens in the cache."""
        tokens = request.token_ids
        stop = num_cached + self._worth
        if len(tokens) <= stop or request.params.prompt_logprobs is not None:
            return False
        for writer, _ in self._writers.values():
            if writer.token_ids[num_cached:stop] != tokens[num_cached:stop]:
                continue
            shared = min(common_prefix(writer.token_ids, tokens), len(tokens) - 1)
            shared -= shared % self._block_size
            if self._snapshots:
                shared = max((stop for stop in writer.checkpoints if stop <= shared), default=0)
            if shared - num_cached >= self._worth and writer.num_written_tokens < shared:
                self._waits[request.name] = (writer, writer.incarnation, shared)
                return True
        return False


class NewTokenRatio:
    """The share of the remaining output for which KV is kept free, 0 to 1."""

    def __init__(self) -> None:
        self.value = _FIRST_RATIO

    def decay(self) -> None:
        """Lower the ratio after a decode step."""
        self.value = max(_LEAST_RATIO, self.value - (_FIRST_RATIO - _LEAST_RATIO) / _RATIO_STEPS)

    def reset(self) -> None:
        """Go back to the initial ratio: nothing runs, and the next requests may be different."""
        self.value = _FIRST_RATIO

    def estimate(self, running: Iterable[TrackedRequest]) -> None:
        """Set the ratio after a retraction: (tokens generated by the running requests + 20 each) / their limits."""
        generated = allowed = 0
        for request in running:
            generated += request.num_output_tokens + _AHEAD
            allowed += request.limit - request.num_prompt_tokens
        if allowed:
            self.value = min(1.0, generated / allowed)

    def tokens(self, requests: Iterable[TrackedRequest]) -> int:
        """Tokens of KV to keep free for the requests' outputs."""
        remaining = sum(min(request.limit - len(request.token_ids), _MOST_REMAINING) for request in requests)
        return int(self.value * remaining)


def choose_victim(requests: Sequence[TrackedRequest], *, by_priority: bool) -> TrackedRequest:
    """The request to retract: with `by_priority` the lowest priority first; then the fewest output tokens, then the
    longest prompt."""
    return min(
        requests,
        key=lambda r: (-r.priority if by_priority else 0, r.num_output_tokens, -r.num_prompt_tokens, -r.arrival),
    )
