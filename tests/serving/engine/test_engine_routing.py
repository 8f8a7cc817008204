"""Which rank serves a request, and how outputs find their way back."""

import asyncio
import heapq
import random
from collections.abc import Sequence

import pytest
from engine_mains import Served, tiny, tokens_of

from model_runner import FinishReason, SamplingParams
from serving.engine import routing
from serving.engine.routing import RequestStream, Router
from serving.engine.wire.messages import Outputs
from serving.requests import EngineDead, EngineStatistics, RequestInput, RequestOutput


def request(name: str, prompt: int = 10, max_tokens: int = 10) -> RequestInput:
    return RequestInput(name, [1] * prompt, SamplingParams(max_tokens=max_tokens))


def outputs(rank: int, received: int, *items: RequestOutput, running: int = 0, waiting: int = 0) -> Outputs:
    return Outputs(rank, received, items, EngineStatistics(num_running=running, num_waiting=waiting))


def end(name: str, tokens: Sequence[int] = (1,)) -> RequestOutput:
    return RequestOutput(name, tokens, finish_reason=FinishReason.LENGTH)


def test_the_rank_with_the_least_outstanding_tokens_is_chosen() -> None:
    router = Router(2, max_num_seqs=8)
    assert add(router, request("long", prompt=100)).rank == 0
    assert [add(router, request(f"short {index}")).rank for index in range(5)] == [1] * 5
    assert router.outstanding[0] == 110
    assert router.outstanding[1] == 100
    assert add(router, request("next", prompt=20)).rank == 1
    assert add(router, request("last")).rank == 0


def test_equal_ranks_take_turns() -> None:
    router = Router(3, max_num_seqs=8)
    for turn in range(6):
        stream = add(router, request(f"r{turn}"))
        assert stream.rank == turn % 3
        router.deliver(outputs(stream.rank, turn // 3 + 1, end(f"r{turn}")))


# -- prefixes --------------------------------------------------------------------------------------------------------


def add(router: Router, given: RequestInput) -> RequestStream:
    stream = router.hold(given)
    router.assign(stream)
    return stream


class Conversation:
    """Prompts that each begin with the one before, its answer, and some more."""

    def __init__(self, seed: int, system: int) -> None:
        self._chance = random.Random(seed)
        self._tokens = [7] * system
        self._turns = 0
        self.name = f"conversation {seed}"

    def ask(self) -> RequestInput:
        self._tokens += self._chance.choices(range(1000), k=self._chance.randint(20, 40))
        self._turns += 1
        return RequestInput(f"{self.name}, turn {self._turns}", list(self._tokens), SamplingParams(max_tokens=32))

    def answered(self) -> int:
        """Its number of tokens, which is when it ends."""
        answer = self._chance.choices(range(1000), k=self._chance.randint(16, 32))
        self._tokens += answer
        return len(answer)


class Ranks:
    """A router, and ranks that remember every page."""

    def __init__(self, num_ranks: int) -> None:
        self.router = Router(num_ranks, max_num_seqs=64)
        self.pages: list[set[tuple[int, ...]]] = [set() for _ in range(num_ranks)]
        self.computed = [0] * num_ranks
        self.prompt_tokens = self.cached_tokens = 0
        self._received = [0] * num_ranks

    def start(self, request: RequestInput) -> int:
        rank = add(self.router, request).rank
        self._received[rank] += 1
        pages = [tuple(request.token_ids[: 16 * end]) for end in range(1, len(request.token_ids) // 16 + 1)]
        cached = 16 * sum(page in self.pages[rank] for page in pages)
        self.pages[rank].update(pages)
        self.prompt_tokens += len(request.token_ids)
        self.cached_tokens += cached
        self.computed[rank] += len(request.token_ids) - cached + 24
        return rank

    def end(self, name: str, rank: int) -> None:
        self.router.deliver(outputs(rank, self._received[rank], end(name)))

    @property
    def imbalance(self) -> float:
        """By how much the busiest rank's tokens exceed those of the idlest."""
        return max(self.computed) / max(1, min(self.computed)) - 1


@pytest.mark.parametrize("system", [0, 200])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_conversation_stays_where_its_pages_are(num_ranks: int, system: int) -> None:
    ranks, conversation = Ranks(num_ranks), Conversation(1, system)
    served = set()
    for _ in range(20):
        request = conversation.ask()
        rank = ranks.start(request)
        conversation.answered()
        ranks.end(request.request_id, rank)
        served.add(rank)
    assert len(served) == 1


@pytest.mark.long
@pytest.mark.parametrize("system", [0, 200])
@pytest.mark.parametrize("together", [True, False])
def test_the_load_of_many_conversations_is_even(together: bool, system: int) -> None:
    """All at once, or always one of them: what they all begin with does not draw them to one rank."""
    ranks, turns = Ranks(2), 10
    conversations = [Conversation(seed, system) for seed in range(64)]
    waiting = [(0.0, number) for number in range(64)] * (1 if together else turns)
    left = [turns] * 64
    running: list[tuple[float, int, str, int]] = []
    while waiting or running:
        if waiting:
            now, number = waiting.pop(0)
            request = conversations[number].ask()
            rank = ranks.start(request)
            heapq.heappush(running, (now + conversations[number].answered(), number, request.request_id, rank))
            left[number] -= 1
        if not together or not waiting:
            now, number, name, rank = heapq.heappop(running)
            ranks.end(name, rank)
            if together and left[number]:
                waiting.append((now, number))
    assert left == [0] * 64
    assert ranks.imbalance < 0.1
    assert ranks.cached_tokens > 0.7 * ranks.prompt_tokens


def test_prefixes_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_MOST_PAGES", 100)
    known = routing.Prefixes(2)
    first = known.pages(list(range(16 * 60)))
    known.add(first, 0)
    assert known.held(first) == [60, 0]
    known.add(known.pages([5] * 16 * 60), 1)
    assert known.held(first) == [40, 0]  # the last pages are forgotten first
    assert len(known._pages) == 100
    assert len(known.pages([5] * 10**6)) == routing._PAGES_OF_A_PROMPT
    assert routing.Prefixes(1).pages([5] * 1000) == []


def test_what_conversations_share_attracts_none() -> None:
    known = routing.Prefixes(2)
    system = list(range(64))
    one, other, third = (known.pages(system + [token] * 32) for token in (1, 2, 3))
    known.add(one, 0)
    assert known.held(other) == [4, 0]  # so far it may be the same one
    known.add(other, 1)
    assert known.held(third) == [0, 0]
    assert known.held(one) == [2, 0]
    assert known.held(other) == [0, 2]


def test_outstanding_tokens_go_down_as_outputs_come_and_vanish_with_the_request() -> None:
    router = Router(1, max_num_seqs=8)
    add(router, request("a"))
    add(router, request("b"))
    router.deliver(outputs(0, 2, RequestOutput("a", [1, 2])))
    assert router.outstanding[0] == 8 + 20
    router.deliver(outputs(0, 2, end("a")))
    assert router.outstanding[0] == 20
    assert router.drop("b") is not None
    assert router.drop("b") is None
    assert router.outstanding[0] == 0
    assert router.num_outstanding == 0


def test_waiting_counts_what_a_rank_has_not_seen_only_beyond_its_free_places() -> None:
    router = Router(1, max_num_seqs=4)
    for index in range(6):
        add(router, request(f"r{index}"))
    assert router.num_waiting == 2
    router.deliver(outputs(0, 5, running=4, waiting=1))
    assert router.num_waiting == 2
    router.deliver(outputs(0, 6, running=4, waiting=2))
    assert router.num_waiting == 2
    router.deliver(outputs(0, 6, running=2, waiting=0))
    assert router.num_waiting == 0


async def test_outputs_of_an_aborted_request_do_not_reach_a_new_one_of_the_same_name() -> None:
    router = Router(1, max_num_seqs=4)
    add(router, request("a"))
    router.drop("a")
    router.aborted(0)
    stream = add(router, request("a"))
    assert stream.number == 3
    router.deliver(outputs(0, 1, RequestOutput("a", [66])))  # sent before the rank knew of the abort
    router.deliver(outputs(0, 3, RequestOutput("a", [7])))
    assert (await stream.get()).token_ids == [7]


async def test_outputs_that_piled_up_come_as_one() -> None:
    stream = RequestStream(request("a"))
    stream.put(RequestOutput("a", [1], prompt_logprobs=[None], num_cached_tokens=4))
    stream.put(RequestOutput("a", [2, 3]))
    stream.put(RequestOutput("a", [4], finish_reason=FinishReason.STOP, stop_token=4))
    assert await stream.get() == RequestOutput(
        "a", [1, 2, 3, 4], [], [None], finish_reason=FinishReason.STOP, stop_token=4, num_cached_tokens=4
    )


async def test_a_failure_comes_after_what_was_there_before() -> None:
    stream = RequestStream(request("a"))
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [1]))
    stream.put(RequestOutput("a", [2]))
    stream.fail(lambda: EngineDead("gone"))
    assert (await waiting).token_ids == [1, 2]
    with pytest.raises(EngineDead, match="gone"):
        await stream.get()


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_conversation_finds_its_prompts_cached(ranks: int) -> None:
    with Served(tiny(ranks)) as served:
        params = SamplingParams(max_tokens=3, ignore_eos=True)

        async def talk() -> float:
            prompt = [place * 13 % 2000 + 1 for place in range(320)]
            for turn in range(24):
                prompt += await tokens_of(served.client, f"turn {turn}", prompt, params)
                prompt += [turn * 7 + place + 1 for place in range(4)]
            await served.client.settle()
            statistics = served.client.statistics.values()
            return sum(each.prefix_hits for each in statistics) / sum(each.prefix_queries for each in statistics)

        assert served.run(talk()) >= 0.92
