"""Tensor-parallel ranks in lock-step: a follower takes in what its leader takes in, then, and in that order.

Ranks that pause together, without a rank that sleeps while another steps: late wake-ups, on two real gloo ranks.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice, FakeLink, FakeStep, make_core
from fake_runner import VOCAB, FakeRunner, be_optimistic, expected
from grammars import Rule, RuleMasks

from model_runner import RequestError, SamplingParams, Step, TokenGrammar
from ranks import run_ranks
from serving.engine import EngineCore, EngineOptions
from serving.engine.rank.lockstep import FollowerLink, LeaderLink, OutOfStep, join_turns
from serving.engine.rank.process import Engine
from serving.engine.wire import messages as wire
from serving.engine.wire.messages import Add, Shutdown, ToEngine, Wake
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from serving.scheduler import SchedulerConfig
from ubatch import CommGroup, TransferTimeout

pytestmark = pytest.mark.long

SAMPLED = SamplingParams(temperature=1.0, max_tokens=3)


class Group:
    """A leader and its followers, over real sockets."""

    def __init__(self, folder: Path, followers: int = 2, timeout_s: float = 30.0) -> None:
        self.look_out: Callable[[], None] = lambda: None
        self.clients = [FakeLink() for _ in range(1 + followers)]
        addresses = [f"ipc://{folder}/turns-{rank}" for rank in range(1, 1 + followers)]
        self.followers = [
            FollowerLink(client, address, (f"rank {rank}", "rank 0"), timeout_s, lambda: self.look_out())
            for rank, (client, address) in enumerate(zip(self.clients[1:], addresses, strict=True), start=1)
        ]
        self.leader = LeaderLink(self.clients[0], addresses)

    def close(self) -> None:
        for link in (self.leader, *self.followers):
            link.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with closing(Group(tmp_path)) as group:
        yield group


def outputs(request_id: str, *tokens: int) -> wire.Outputs:
    return wire.Outputs(0, 1, [RequestOutput(request_id, tokens)], EngineStatistics())


# ---------------------------------------------------------------------------------------------------------- messages


def test_followers_take_in_the_same_turn_by_turn(group: Group) -> None:
    first = [wire.Abort("x"), wire.Add(RequestInput("a", [1, 2], SamplingParams(seed=3)), 1)]
    group.clients[0].to_engine += first
    assert list(group.leader.receive()) == first
    assert list(group.leader.receive()) == []  # before a step even nothing is a turn
    assert list(group.leader.receive(0.01)) == []  # in a pause it is not
    group.clients[0].to_engine.append(wire.Abort("a"))
    assert list(group.leader.receive(0.01)) == [wire.Abort("a")]
    for follower in group.followers:
        assert list(follower.receive()) == first
        assert list(follower.receive()) == []
        assert list(follower.receive(0.5)) == [wire.Abort("a")]
        assert list(follower.receive(0.01)) == []


def test_a_follower_says_nothing_of_requests(group: Group) -> None:
    ready = wire.Ready(1, 1, 1, "")
    written, failed = wire.ProfileWritten(1, "x", None), wire.Failed(1, "")
    for message in (ready, outputs("a", 1), wire.Refused(0, "b", "RequestError", "no"), written, failed):
        group.followers[0].send(message)
        group.leader.send(message)
    assert group.clients[1].heard == [ready, written, failed]
    assert len(group.clients[0].heard) == 5


def test_where_followers_listen(tmp_path: Path) -> None:
    """In the run's private folder on their own machine, however many machines there are."""
    options = EngineOptions(Path("model"), data_parallel_size=2, tensor_parallel_size=2, nnodes=2, master_port=1)
    clients = FakeLink(), FakeLink(wire.Abort("a"))
    follower = join_turns(clients[0], tmp_path, options, 3, lambda: None)
    leader = join_turns(clients[1], tmp_path, options, 2, lambda: None)
    with closing(follower), closing(leader):
        assert (tmp_path / "turns-3").is_socket()
        assert list(leader.receive()) == list(follower.receive()) == [wire.Abort("a")]
    alone = FakeLink()
    assert join_turns(alone, tmp_path, EngineOptions(Path("model")), 0, lambda: None) is alone


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    "told",
    [outputs("a", 1, 3), outputs("b", 1, 2), wire.Refused(0, "a", "RequestError", "no"), wire.Ready(0, 1, 1, "")],
)
def test_a_follower_that_generates_something_else_stops(group: Group, told: wire.FromEngine) -> None:
    group.leader.send(outputs("a", 1, 2))
    list(group.leader.receive())
    group.followers[0].send(outputs("a", 1, 2))
    assert list(group.followers[0].receive()) == []
    group.followers[1].send(told)
    with pytest.raises(OutOfStep, match="rank 2 generated other tokens than rank 0 before turn 0"):
        list(group.followers[1].receive())


def test_a_turn_that_is_lost_is_noticed(group: Group) -> None:
    list(group.leader.receive())
    group.leader._number += 1
    list(group.leader.receive())
    assert list(group.followers[0].receive()) == []
    with pytest.raises(OutOfStep, match="rank 1 missed a turn of rank 0: 2 arrived, not 1"):
        list(group.followers[0].receive())


def test_a_follower_without_a_leader_hears_the_shutdown(group: Group) -> None:
    for wait_s in (0.0, 0.01):
        group.clients[1].to_engine.append(wire.Shutdown())
        assert list(group.followers[0].receive(wait_s)) == [wire.Shutdown()]


def test_a_follower_looks_out_while_it_waits(group: Group) -> None:
    def gone() -> None:
        raise ProcessLookupError

    group.look_out = gone
    with pytest.raises(ProcessLookupError):
        list(group.followers[0].receive())


def test_a_leader_that_hangs_is_named(tmp_path: Path) -> None:
    with (
        closing(Group(tmp_path, timeout_s=0.1)) as group,
        pytest.raises(TransferTimeout, match=r"rank 0 has begun no step for 0\.1 s, and rank 1 waits for it"),
    ):
        list(group.followers[0].receive())


# ------------------------------------------------------------------------------------------------------ whole engines


class Recorder(FakeDevice):
    """Remembers what every step ran. Steps take a moment, so that requests pile up."""

    def __init__(self, runner: FakeRunner, *times: float) -> None:
        super().__init__(runner, *times)
        self.steps: list[list[tuple[str, int, int]]] = []

    def launch(self, step: Step, /) -> FakeStep:
        time.sleep(0.0005)
        self.steps.append([(str(s.request.request_id), s.num_tokens, s.request.row or 0) for s in step.shares])
        return super().launch(step)


class Live(FakeLink):
    """Says what comes over time, from another thread; `Shutdown` when all has ended that nobody takes back."""

    def __init__(self, messages: Sequence[wire.ToEngine], draw: random.Random) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._say, args=(messages, draw))
        self._thread.start()

    def _say(self, messages: Sequence[wire.ToEngine], draw: random.Random) -> None:
        for number, message in enumerate(messages):
            if number > len(messages) // 2:
                time.sleep(draw.random() * 0.004)
            self.to_engine.append(message)
        while not staying(messages) <= set(self._ended()):
            time.sleep(0.01)
        self.to_engine.append(wire.Shutdown())

    def _ended(self) -> Iterator[str]:
        for message in list(self.heard):
            for output in message.outputs if isinstance(message, wire.Outputs) else ():
                if output.finish_reason is not None:
                    yield output.request_id

    def close(self) -> None:
        self._thread.join()


class SlowGrammars:
    """Grammars that take some time in a thread, another on every rank; one of them cannot be made."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._threads = ThreadPoolExecutor(2)

    def begin(self, text: str) -> Future[Callable[[], TokenGrammar]]:
        return self._threads.submit(self._make, text, self._draw.random() * 0.004)

    def _make(self, text: str, seconds: float) -> Callable[[], TokenGrammar]:
        time.sleep(seconds)
        if text == BROKEN:
            raise RequestError("no grammar", param="grammar")
        return lambda: Rule(lambda output: range(VOCAB), RuleMasks(-(-VOCAB // 32)))


BROKEN = "broken"


def refused(request: RequestInput) -> bool:
    return request.token_ids == [10**6] or request.params.grammar == BROKEN


def a_load(draw: random.Random, count: int) -> list[wire.ToEngine]:
    """Requests, some of them aborted later, whether they have ended or not; and some that are refused. A third has a
    grammar."""
    messages: list[wire.ToEngine] = []
    for number in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 24))]
        if draw.random() < 0.1:
            prompt = [10**6]
        grammar = draw.choice([*[None] * 8, *["one", "two"] * 2, BROKEN])
        params = SamplingParams(max_tokens=draw.randrange(20, 80), ignore_eos=grammar is None, grammar=grammar)
        messages.append(wire.Add(RequestInput(f"r{number}", prompt, params), number + 1))
        if draw.random() < 0.3:
            messages.append(wire.Abort(f"r{draw.randrange(number + 1)}"))
    return messages


def staying(load: Sequence[wire.ToEngine]) -> set[str]:
    """The requests that are neither refused nor aborted."""
    added = {m.request.request_id for m in load if isinstance(m, wire.Add) and not refused(m.request)}
    return added - {message.request_id for message in load if isinstance(message, wire.Abort)}


def serve(core: EngineCore, link: FakeLink | LeaderLink | FollowerLink, rank: int) -> None:
    Engine(EngineOptions(Path("model"), tensor_parallel_size=3), rank, core, None, link).serve()


@pytest.mark.sample(5)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_followers_run_the_same_steps(tmp_path: Path, seed: int, overlap: bool) -> None:
    """With little memory, so that requests are retracted, and messages and grammars that come whenever they like."""
    draw = random.Random(seed)
    load = a_load(draw, 40)
    config = SchedulerConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)
    cores = [make_core(overlap=overlap, blocks=48, config=config, device=Recorder)[0] for _ in range(3)]
    recorders: list[Any] = [core.executor for core in cores]
    for rank, core in enumerate(cores):
        core._grammars = SlowGrammars(random.Random(100 * seed + rank))
        be_optimistic(core)  # type: ignore[arg-type]
    with ExitStack() as stack:
        group = stack.enter_context(closing(Group(tmp_path)))
        live = stack.enter_context(closing(Live(load, draw)))
        group.leader._link = live
        links = (group.leader, *group.followers)
        threads = [
            threading.Thread(target=serve, args=(core, link, rank))
            for rank, (core, link) in enumerate(zip(cores, links, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert recorders[0].steps == recorders[1].steps == recorders[2].steps
    assert sum(map(len, recorders[0].steps)) > 100
    assert cores[0].statistics().preemptions > 0
    assert cores[1].statistics() == cores[2].statistics() == cores[0].statistics()
    for client in group.clients[1:]:
        assert {type(message) for message in client.heard} == {wire.Alive}
    tokens, to_their_end = live.tokens(), staying(load)
    for request in (message.request for message in load if isinstance(message, wire.Add)):
        if not refused(request):
            wanted, given = expected(request.token_ids, request.params), tokens.get(request.request_id, [])
            assert given == (wanted if request.request_id in to_their_end else wanted[: len(given)])


# -- pauses ------------------------------------------------------------------------------------------------------------


Script = Sequence[tuple[float, ToEngine]]

LONG = RequestInput("long", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
SHORT = RequestInput("short", [4, 5], SamplingParams(max_tokens=1, ignore_eos=True))


class ScriptedLink(FakeLink):
    """Messages that come at set times, in seconds from the first look; `Shutdown` only to one that sleeps."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.slept = 0
        self._script = list(script)
        self._begun: float | None = None

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        self._begun = self._begun or time.monotonic()
        self.slept += wait_s > 0
        until = time.monotonic() + wait_s
        while self._script and self._due() > time.monotonic() and time.monotonic() < until:
            time.sleep(0.005)
        while self._script and self._due() <= time.monotonic():
            if isinstance(self._script[0][1], Shutdown) and not wait_s:
                return
            yield self._script.pop(0)[1]

    def _due(self) -> float:
        return self._begun + self._script[0][0]


class SharedDevice(FakeDevice):
    """A step is an all-reduce: it ends only when every rank takes it."""

    def launch(self, step: Step, /) -> FakeStep:
        total = torch.tensor(len(step.shares))
        dist.all_reduce(total)
        self.peers_busy = int(total) > len(step.shares)
        return super().launch(step)


def serve_script(
    rank: int, world_size: int, overlap: bool, scripts: Sequence[Script]
) -> tuple[dict[str, list[int]], int]:
    """Run a rank's script; returns what came out, and how often it slept."""
    core, _, _ = make_core(overlap=overlap, device=SharedDevice)
    group = CommGroup.from_process_group(timeout_s=20)
    link = ScriptedLink(scripts[rank])
    dist.barrier()
    options = EngineOptions(Path("model"), data_parallel_size=2)
    Engine(options, rank, core, group, link).serve()
    return link.tokens(), link.slept


def tokens_of(request: RequestInput) -> list[int]:
    return expected(request.token_ids, request.params)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wake_up_that_comes_late_finds_nobody_asleep(overlap: bool) -> None:
    """Rank 0 has served the second request long before rank 1 hears that there is one. Had both paused by then, rank 1
    would wake, and wait for a step of rank 0 that never comes."""
    scripts: list[Script] = [
        [(0.0, Add(LONG, 1)), (0.0, Add(SHORT, 2)), (1.0, Shutdown())],
        [(0.0, Wake(1)), (0.5, Wake(2)), (1.0, Shutdown())],
    ]
    (first, slept), (second, also_slept) = run_ranks(serve_script, 2, overlap, scripts)
    assert first == {"long": tokens_of(LONG), "short": tokens_of(SHORT)}
    assert second == {}
    assert slept == also_slept == 2  # before the first request, and after the last


@pytest.mark.parametrize("overlap", [False, True])
def test_paused_ranks_wake_for_a_request_of_either(overlap: bool) -> None:
    scripts: list[Script] = [
        [(0.3, Wake(1)), (0.6, Add(SHORT, 2)), (1.0, Shutdown())],
        [(0.3, Add(LONG, 1)), (0.6, Wake(2)), (1.0, Shutdown())],
    ]
    (first, slept), (second, also_slept) = run_ranks(serve_script, 2, overlap, scripts)
    assert (first, second) == ({"short": tokens_of(SHORT)}, {"long": tokens_of(LONG)})
    assert slept == also_slept > 0
