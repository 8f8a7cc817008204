"""Bodies with many prompts take turns with others: who is admitted when, by counting steps."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from unittest import mock

import pytest
from fake_runner import Loop, admitted, make_loop, shares
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner import SamplingParams
from serving.scheduler import KVManager, SchedulingPolicy, TrackedRequest
from serving.scheduler.waiting import WaitingQueue

pytestmark = pytest.mark.long

LARGE = {"num_blocks": 4096, "block_size": 16, "max_model_len": 1024, "max_num_batched_tokens": 256}


def add_body(loop: Loop, name: str, count: int, length: int = 3, **params: object) -> None:
    for number in range(count):
        prompt = [(number * 7 + place * place) % 49 + 1 for place in range(length - 2)] + [
            number % 49 + 1,
            number // 49,
        ]
        loop.add(f"{name}{number}", prompt, group=name, **params)  # type: ignore[arg-type]


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_short_request_behind_2000_prompts_is_admitted_in_the_next_step_with_room(policy: SchedulingPolicy) -> None:
    loop = make_loop(num_blocks=256, max_num_seqs=16, policy=policy)
    add_body(loop, "many", 2000, max_tokens=2, ignore_eos=True)
    assert len(admitted(loop.step())) == 16
    loop.add("short", [5, 6], max_tokens=1)
    assert admitted(loop.step()) == []  # the rows are taken
    names = admitted(loop.step())
    assert names[1] == "short"
    assert len(names) == 16
    assert loop.step().shares
    assert len(loop.tokens("short")) == 1
    for number in range(5):  # every later one as soon as the first
        loop.add(f"short{number}", [5, 6, 7 + number], max_tokens=1)
        assert any(f"short{number}" in admitted(loop.step()) for _ in range(3))
    loop.run()
    assert len(loop.outputs) == 2006


def test_what_lpm_passed_over_comes_when_its_turn_was_long_ago() -> None:
    queue = WaitingQueue(SchedulingPolicy.LPM, lambda request: request.group != "poor")
    queue.push(tracked("poor", 0, "poor"))
    for number in range(1, 400):
        queue.push(tracked(f"r{number}", number, "rich"))
        first = next(queue.in_order())
        queue.admit(first)
        if first.group == "poor":
            break
    assert number == 259


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_short_request_behind_200_long_prompts_runs_beside_the_one_that_is_cut(policy: SchedulingPolicy) -> None:
    loop = make_loop(num_blocks=1024, max_model_len=1024, max_num_batched_tokens=256, policy=policy)
    add_body(loop, "long", 200, length=1000, max_tokens=1)
    assert admitted(loop.step()) == ["long0"]
    loop.add("short", [5, 6], max_tokens=1)
    assert shares(loop.step()) == [("long0", 252), ("short", 2)]  # 254, up to the end of a page


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_long_prompts_that_share_their_beginning_hold_up_nobody(policy: SchedulingPolicy) -> None:
    """Once it is cached, `lpm` has all of them before the short one."""
    loop = make_loop(num_blocks=4096, max_model_len=1024, max_num_batched_tokens=256, policy=policy, checked=False)
    shared = [place * place % 49 + 1 for place in range(500)]
    for number in range(60):
        own = [(number + place) % 49 + 1 for place in range(490)] + [number % 49]
        loop.add(f"long{number}", shared + own, group="body", max_tokens=1)
    for _ in range(6):
        loop.step()
    assert loop.scheduler._prefills.split is not None
    loop.add("short", [5, 6], max_tokens=1)
    assert "short" in admitted(loop.step())


@pytest.mark.wide
def test_beside_a_prompt_that_is_cut_few_of_its_own_body_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(num_blocks=256, max_model_len=1024, max_num_batched_tokens=64)
    loop.add("long", [1] * 1000, group="body", max_tokens=1)
    for number in range(5000):
        loop.add(f"tail{number}", [2, 3], group="body", max_tokens=1)
    loop.step()
    assert loop.scheduler._prefills.split is not None
    looked = Counter[str]()
    in_order = WaitingQueue.in_order

    def counted(self: WaitingQueue) -> Iterator[TrackedRequest]:
        for request in in_order(self):
            looked[request.group] += 1
            yield request

    monkeypatch.setattr(WaitingQueue, "in_order", counted)
    loop.step()
    assert 0 < looked["body"] <= 130


@pytest.mark.parametrize("budget", [8, 10, 15, 16, 20, 64])
def test_the_prompt_that_is_cut_and_others_both_get_on(budget: int) -> None:
    """In every step where it has room for two pages, else in turns."""
    loop = make_loop(num_blocks=512, block_size=8, max_model_len=1024, max_num_batched_tokens=budget, max_num_seqs=8)
    loop.add("long", [1] * 1000, max_tokens=1)
    loop.step()
    for number in range(400):
        loop.add(f"short{number}", [number % 49 + 1] * 2, max_tokens=1)
    steps = []
    for _ in range(12):
        step = loop.step()
        assert sum(share.num_tokens for share in step.shares) <= budget
        steps.append(("long" in admitted(step), any(share.request.request_id != "long" for share in step.shares)))
    every = 1 if budget >= 16 else 2
    for kind in (0, 1):
        got = [step[kind] for step in steps]
        assert all(any(got[first : first + every]) for first in range(12 - every + 1)), got


@pytest.mark.parametrize("limit", [16, 24, 31, 32, 48, "auto"])
def test_with_any_limit_a_short_request_runs_beside_a_prompt_that_is_cut(limit: int | str) -> None:
    loop = make_loop(**LARGE, max_prefill_tokens_per_mixed_step=limit, checked=False)
    loop.add("runs", [1] * 8, max_tokens=900, ignore_eos=True)
    loop.step()
    loop.add("long", [place * place % 49 + 1 for place in range(1000)], max_tokens=1)
    while loop.scheduler._prefills.split is None:  # `auto` looks at decodes alone first
        loop.step()
    for number in range(20):
        loop.add(f"short{number}", [5, 6, *[number] * 10], group="shorts", max_tokens=1)
    names = []
    while loop.scheduler._prefills.split is not None:
        names.append(admitted(loop.step()))
    limited = [each for each in names if each]  # `auto` leaves a step to the decodes now and then
    assert any("short0" in each for each in limited[:3])
    assert all("long" in one or "long" in other for one, other in pairwise(limited))
    loop.run()


@pytest.mark.wide
def test_who_waits_for_a_prefix_costs_a_step_little() -> None:
    loop = make_loop(**LARGE, max_num_seqs=64)
    shared = [place * place % 49 + 1 for place in range(120)]
    for number in range(2000):
        loop.add(f"r{number}", [*shared, number % 49 + 1, number // 49 + 1], group="body", max_tokens=1)
    with mock.patch.object(KVManager, "lookup", autospec=True, side_effect=KVManager.lookup) as lookup:
        assert admitted(loop.step()) == ["r0"]
    assert lookup.call_count < 300
    loop.run()
    assert len(loop.outputs) == 2000


def test_half_of_each_step_stays_with_the_prompt_that_is_cut() -> None:
    loop = make_loop(num_blocks=1024, max_model_len=1024, max_num_batched_tokens=64)
    add_body(loop, "long", 2, length=1000, max_tokens=1)
    loop.step()
    for number in range(40):
        loop.add(f"short{number}", [number % 49 + 1] * 16, max_tokens=1)
    steps = 0
    while "long1" not in admitted(step := loop.step()):
        steps += 1
        of_long = [share.num_tokens for share in step.shares if share.request.request_id == "long0"]
        assert (of_long and of_long[0] >= 32) or loop.scheduler._prefills.split is None
    assert steps <= 1000 / 32
    loop.run()
    assert len(loop.outputs) == 42


def test_those_that_were_retracted_come_first_and_keep_their_order() -> None:
    queue = WaitingQueue(SchedulingPolicy.FCFS, lambda request: 0)
    body = [tracked(f"a{number}", number, "a") for number in range(6)]
    for request in body:
        queue.push(request)
    for request in body[:3]:
        queue.admit(request)
    for request in (body[2], body[0]):
        request.retracted = True
        queue.push(request)
    queue.push(tracked("b", 6, "b"))
    assert [request.name for request in queue.in_order()] == ["a0", "a2", "a3", "b", "a4", "a5"]


def test_a_newcomer_does_not_get_ahead_of_those_who_wait_for_the_same_turn() -> None:
    """However many short bodies come, the long one gets a turn in every round."""
    queue = WaitingQueue(SchedulingPolicy.FCFS, lambda request: 0)
    for number in range(50):
        queue.push(tracked(f"a{number}", number, "a"))
    last_turn, taken = 50, 0
    for number in range(50, 250):
        queue.push(tracked(f"b{number}", number, ""))
        first = next(queue.in_order())
        queue.admit(first)
        if first.group == "a":
            last_turn, taken = number, taken + 1
        else:
            assert first.arrival <= last_turn
    assert taken > 10


def tracked(name: str, arrival: int, group: str, priority: int = 0) -> TrackedRequest:
    return TrackedRequest(
        name, [1], SamplingParams(max_tokens=1), priority=priority, arrival=arrival, group=group or name
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push", "push", "push", "admit", "remove", "retract"]))),
    st.sampled_from([SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY]),
)
def test_nothing_is_lost_and_nobody_waits_for_two_of_another_group(
    moves: list[tuple[int, str]], policy: SchedulingPolicy
) -> None:
    queue = WaitingQueue(policy, lambda request: 0)
    waiting: dict[str, TrackedRequest] = {}
    running: list[TrackedRequest] = []
    passed: dict[str, Counter[str]] = {}  # who was admitted while this one was the first of its group
    for arrival, (number, move) in enumerate(moves):
        if move == "push":
            request = tracked(f"r{arrival}", arrival, f"g{number}", number % 2)
            queue.push(request)
            waiting[request.name] = request
        elif move == "admit" and waiting:
            request = next(queue.in_order())
            queue.admit(request)
            del waiting[request.name]
            running.append(request)
            firsts = {each.group: each for each in sorted(waiting.values(), key=lambda r: -r.arrival)}
            urgency = request.priority if policy is SchedulingPolicy.PRIORITY else 0
            for first in firsts.values():
                own = first.priority if policy is SchedulingPolicy.PRIORITY else 0
                if request.retracted or own != urgency or first.group == request.group:
                    continue
                counts = passed.setdefault(first.name, Counter())
                counts[request.group] += 1
                assert counts[request.group] <= 1, "two of a group before the first of another"
            assert all(r.arrival > request.arrival for r in waiting.values() if r.group == request.group), "not FIFO"
            request.retracted = False
        elif move == "remove" and waiting:
            request = list(waiting.values())[number % len(waiting)]
            queue.remove(request)
            del waiting[request.name]
            passed.clear()  # the turn of one that is gone is not given to the next of its group
        elif move == "retract" and running:
            request = running.pop()
            request.retracted = True
            queue.push(request)
            waiting[request.name] = request
    assert {request.name for request in queue.in_order()} == set(waiting)
    for request in list(queue.in_order()):
        queue.admit(request)
    assert len(queue) == 0
    assert not queue._turns, "what is known of groups goes with them"


@pytest.mark.slow
def test_the_next_is_found_without_looking_at_all_that_wait() -> None:
    queue = WaitingQueue(SchedulingPolicy.FCFS, lambda request: 0)
    body = [tracked(f"a{number}", number, "a") for number in range(50_000)]
    for request in body:
        queue.push(request)
    with mock.patch.object(WaitingQueue, "_key", autospec=True, side_effect=WaitingQueue._key) as key:
        queue.push(tracked("b", 50_000, "b"))
        for request, _ in zip(queue.in_order(), range(100), strict=False):
            queue.admit(request)
        queue.remove(body[-1])
    assert key.call_count < 102 * 20
