"""Chooses the rank of each request, and delivers its outputs to the waiting caller. No sockets, no processes.

A conversation goes to the rank that was sent its beginning, and finds its pages where they were computed (`Prefixes`).
A prompt is cut into pages, and a page's hash is of all tokens up to its end, so that one hash stands for a prefix. A
conversation's own pages attract it. What different prompts begin with, such as a system prompt, attracts none: it is
soon on all ranks, and would draw every new conversation to the first one.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serving.engine.wire.messages import Outputs
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from ubatch import UBatchError

_NEAR = 0.05
"""Ranks whose outstanding tokens differ by no more than this share are equally loaded."""
_PAGE = 16
"""Tokens. It need not be the engines' page size: the longest prefix is the longest in any unit."""
_MOST_PAGES = 2**16
"""Most pages known, a million tokens; the least recently used are forgotten."""
_PAGES_OF_A_PROMPT = 1024
"""Pages of a prompt that are looked at, so that a long one takes a millisecond."""


@dataclass(slots=True, eq=False)
class RequestStream:
    """The outputs of one request, queued for the caller that waits for them.

    Attributes:
        request: as it came.
        rank: serves it; None while it is held here.
        number: the request was message `number` to its rank. Outputs sent before the rank had handled that message
            belong to an earlier request with the same id.
        outstanding: most tokens that the rank still has to compute for it.
        tokens: the output so far.
        was_sent: an engine has had it before.
    """

    request: RequestInput
    rank: int | None = None
    number: int = 0
    outstanding: int = 0
    tokens: list[int] = field(default_factory=list)
    was_sent: bool = False
    _prompt_left: int = 0
    _outputs: list[RequestOutput] = field(default_factory=list)
    _error: Callable[[], UBatchError] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def input(self) -> RequestInput:
        """What an engine gets: the request, and its output so far."""
        return replace(self.request, generated=tuple(self.tokens)) if self.tokens else self.request

    def send_to(self, rank: int, number: int) -> None:
        """It is sent to a rank, as its message `number`."""
        self.rank, self.number, self.was_sent = rank, number, True
        self._prompt_left = len(self.request.token_ids) + len(self.tokens)
        self.outstanding = len(self.request.token_ids) + self.request.params.max_tokens
        self._changed.set()

    def hold(self) -> None:
        """Its rank is gone."""
        self.rank, self.outstanding = None, 0

    async def begun(self) -> None:
        """Wait until it is sent to a rank, or has failed."""
        while not self.was_sent and self._error is None:
            self._changed.clear()
            await self._changed.wait()

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        if output.token_ids:
            self.outstanding -= self._prompt_left + len(output.token_ids)
            self._prompt_left = 0
            self.tokens += output.token_ids
        self._outputs.append(output)
        self._changed.set()

    def fail(self, error: Callable[[], UBatchError]) -> None:
        """No more outputs follow; `get` raises the error that `error()` returns."""
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        """All outputs since the last call, merged into one; waits for the first.

        Raises:
            UBatchError: the error given to `fail`, once all earlier outputs were returned.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error()
            self._changed.clear()
            await self._changed.wait()
        parts, self._outputs = self._outputs, []
        return RequestOutput.merged(parts)


@dataclass(slots=True)
class _Page:
    """A prefix that ends with a page.

    Attributes:
        ranks: bit r is set if rank r was sent it.
        next: hash of the page that followed it first; None before any did.
        shared: whether different pages followed it, so that it is of several conversations.
    """

    ranks: int = 0
    next: int | None = None
    shared: bool = False


class Prefixes:
    """The beginnings of prompts that the ranks were sent. The scheduler's cache may have forgotten them earlier."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pages: dict[int, _Page] = {}  # the least recently used first

    def pages(self, token_ids: Sequence[int]) -> list[int]:
        """The hashes of a prompt's whole pages."""
        last, hashes = 0, []
        if self._num_ranks > 1:
            for begin in range(0, min(len(token_ids) // _PAGE, _PAGES_OF_A_PROMPT) * _PAGE, _PAGE):
                last = hash((last, *token_ids[begin : begin + _PAGE]))
                hashes.append(last)
        return hashes

    def held(self, pages: Sequence[int]) -> list[int]:
        """By rank, how many pages of this prompt's own conversation it was sent, without a gap."""
        held, ranks, shared = [0] * self._num_ranks, -1, 0
        for count, page in enumerate(pages, 1):
            known = self._pages.get(page)
            ranks &= 0 if known is None else known.ranks
            if known is None or not ranks:
                break
            shared = count if known.shared else shared
            for rank in range(self._num_ranks):
                if ranks >> rank & 1:
                    held[rank] = count
        return [max(0, count - shared) for count in held]

    def add(self, pages: Sequence[int], rank: int) -> None:
        """The rank is sent a prompt with these pages."""
        following: int | None = None
        for page in reversed(pages):  # the first pages are the last to be forgotten: later ones are no use without
            known = self._pages.pop(page, None) or _Page()
            known.ranks |= 1 << rank
            known.shared |= None not in (known.next, following) and known.next != following
            known.next = known.next if following is None else following
            self._pages[page] = known
            following = page
        while len(self._pages) > _MOST_PAGES:
            del self._pages[next(iter(self._pages))]


class Router:
    """Assigns requests to ranks, and keeps their streams.

    Attributes:
        outstanding: by rank, the most tokens that it still has to compute.
    """

    def __init__(self, num_ranks: int, max_num_seqs: int) -> None:
        self._last = {rank: EngineStatistics() for rank in range(num_ranks)}  # as the ranks that run have sent them
        self._earlier = dict(self._last)  # of those before them
        self._max_num_seqs = max_num_seqs
        self._streams: dict[str, RequestStream] = {}
        self._prefixes = Prefixes(num_ranks)
        self.outstanding = [0] * num_ranks
        self._sent = [0] * num_ranks
        self._received = [0] * num_ranks

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """Rank -> its last statistics; totals include those of the ranks before it."""
        return {rank: last.after(self._earlier[rank]) for rank, last in self._last.items()}

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet: those that wait on a rank, those not yet received by one, and those held here.

        The latter two count only if they exceed the ranks' free places, so that they would wait.
        """
        unseen, held = [0] * len(self._sent), 0
        for stream in self._streams.values():
            if stream.rank is None:
                held += 1
            else:
                unseen[stream.rank] += stream.number > self._received[stream.rank]
        total = 0
        for rank, new in enumerate(unseen):
            known = self._last[rank]
            free = max(0, self._max_num_seqs - known.num_running - known.num_waiting)
            total += known.num_waiting + max(0, new - free)
            held = max(0, held - max(0, free - new))
        return total + held

    @property
    def all_received(self) -> bool:
        """Whether every rank has answered every request and abort that was sent to it."""
        return self._received == self._sent

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    @property
    def requests(self) -> Collection[str]:
        """The ids of all requests, in the order of their arrival."""
        return self._streams.keys()

    @property
    def held(self) -> Sequence[RequestStream]:
        """The requests that no rank has, in the order of their arrival."""
        return [stream for stream in self._streams.values() if stream.rank is None]

    def hold(self, request: RequestInput) -> RequestStream:
        """A new request, which no rank has yet."""
        stream = self._streams[request.request_id] = RequestStream(request)
        return stream

    def assign(self, stream: RequestStream) -> int:
        """Assign a request to the rank with the fewest outstanding tokens; of those that have nearly as few, to the one
        that was sent most of the conversation already, then to that with fewest messages. Returns the rank."""
        pages = self._prefixes.pages(stream.request.token_ids)
        held, least = self._prefixes.held(pages), min(self.outstanding)
        near = [rank for rank, tokens in enumerate(self.outstanding) if least >= (1 - _NEAR) * tokens]
        rank = min(near, key=lambda each: (-held[each], self.outstanding[each], self._sent[each]))
        self._prefixes.add(pages, rank)
        self._sent[rank] += 1
        stream.send_to(rank, self._sent[rank])
        self.outstanding[rank] += stream.outstanding
        return rank

    def drop(self, request_id: str) -> RequestStream | None:
        """Remove a request that ended, and return its stream; None if there is no such request."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and stream.rank is not None:
            self.outstanding[stream.rank] -= stream.outstanding
        return stream

    def aborted(self, rank: int) -> None:
        """Count an abort that was sent to a rank."""
        self._sent[rank] += 1

    def deliver(self, message: Outputs) -> None:
        """Deliver the outputs of a rank to their streams. Requests that have ended are removed."""
        self._last[message.rank] = message.statistics
        self._received[message.rank] = message.received
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.rank != message.rank or message.received < stream.number:
                continue  # of a request that was aborted
            before = stream.outstanding
            stream.put(output)
            self.outstanding[message.rank] += stream.outstanding - before
            if output.finish_reason is not None:
                self.drop(output.request_id)

    def hold_all(self) -> None:
        """The engines are gone: hold all requests until others can take them."""
        num_ranks = len(self._sent)
        self._earlier = dict(self.statistics)
        self._last = dict.fromkeys(self._earlier, EngineStatistics())
        self.outstanding, self._sent, self._received = [0] * num_ranks, [0] * num_ranks, [0] * num_ranks
        self._prefixes = Prefixes(num_ranks)
        for stream in self._streams.values():
            stream.hold()

    def fail_all(self, error: Callable[[], UBatchError]) -> None:
        """Fail all requests."""
        streams, self._streams = self._streams, {}
        self.outstanding = [0] * len(self.outstanding)
        for stream in streams.values():
            stream.fail(error)
