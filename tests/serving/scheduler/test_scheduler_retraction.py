"""KV pressure: who gives way, how it comes back, and who stays."""

from __future__ import annotations

import pytest
from fake_runner import Loop, be_optimistic, make_loop

from model_runner import FinishReason
from serving.scheduler import SchedulingPolicy
from serving.scheduler.prefills import NewTokenRatio, choose_victim
from serving.scheduler.request import shares_of


def pressed(*requests: tuple[str, list[int], int], num_blocks: int, **config: object) -> Loop:
    """A loop that keeps no KV for outputs, with requests: name, prompt, `max_tokens`."""
    loop = be_optimistic(make_loop(num_blocks=num_blocks, **config))  # type: ignore[arg-type]
    for name, prompt, max_tokens in requests:
        loop.add(name, prompt, max_tokens=max_tokens, ignore_eos=True)
    return loop


def running(loop: Loop) -> list[str]:
    return list(loop.scheduler._running)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_retracted_request_comes_back_and_gives_the_same_tokens(overlapped: bool, caching: bool) -> None:
    four = [(f"r{number}", [number + 1] * 10, 30) for number in range(4)]
    loop = pressed(*four, num_blocks=12, overlapped=overlapped, enable_prefix_caching=caching)
    preemptions = 0
    while loop.scheduler.has_work:
        step = loop.step()
        loop.scheduler.check()
        if loop.scheduler.statistics().preemptions > preemptions:
            assert not any(share.prefill for share in shares_of(step))  # else it would be admitted again at once
        preemptions = loop.scheduler.statistics().preemptions
    loop.run()
    assert preemptions >= 3


def test_the_fewest_outputs_and_the_longest_prompt_give_way() -> None:
    loop = pressed(("old", [1] * 5, 40), num_blocks=12)
    for _ in range(4):
        loop.step()
    loop.add("short", [2] * 6, max_tokens=40, ignore_eos=True)
    loop.add("long", [3] * 10, max_tokens=40, ignore_eos=True)
    loop.step()
    gone = []
    while len(running(loop)) > 1:
        before = running(loop)
        loop.step()
        gone += [name for name in before if name not in running(loop)]
    assert gone == ["long", "short"]
    assert [request.name for request in loop.scheduler._waiting] == ["short", "long"]  # as they came
    loop.run()


def test_the_lowest_priority_gives_way_first() -> None:
    loop = pressed(num_blocks=8, policy=SchedulingPolicy.PRIORITY)
    loop.add("unimportant", [1] * 5, priority=9, max_tokens=40, ignore_eos=True)
    for _ in range(4):
        loop.step()
    loop.add("important", [2] * 6, priority=0, max_tokens=40, ignore_eos=True)
    while "unimportant" in running(loop):
        loop.step()
    assert running(loop) == ["important"]
    loop.run()


def test_what_was_written_is_not_computed_again_if_it_is_still_there() -> None:
    loop = pressed(("a", [1] * 10, 12), ("b", [2] * 10, 12), num_blocks=8)
    while loop.scheduler.statistics().preemptions == 0:
        loop.step()
    (waiting,) = loop.scheduler._waiting
    assert len(loop.scheduler.kv.lookup(waiting).blocks) > 0
    assert waiting.retracted
    loop.run()


@pytest.mark.parametrize(("prompts", "given"), [([[1] * 10, [2] * 10], 23), ([[1] * 32], 1)])
def test_an_output_ends_where_the_whole_cache_does_however_many_run(prompts: list[list[int]], given: int) -> None:
    requests = [(str(number), prompt, 100) for number, prompt in enumerate(prompts)]
    loop = pressed(*requests, num_blocks=8)
    loop.run()
    for name, _, _ in requests:
        assert len(loop.tokens(name)) == given
        assert loop.outputs[name][-1].finish_reason is FinishReason.LENGTH


def test_the_last_one_is_not_retracted_for_those_that_are_done() -> None:
    """In the overlap loop a request may hold its blocks only until its last token is known."""
    loop = pressed(("done", [1] * 7, 1), ("goes on", [2] * 8, 6), num_blocks=4, overlapped=True)
    loop.run()
    assert loop.scheduler.statistics().preemptions == 0


# -- results that come after a retraction ------------------------------------------------------------------------------


def test_a_late_result_of_an_earlier_life_brings_no_kv() -> None:
    loop = make_loop(max_num_batched_tokens=16)
    loop.add("a", list(range(1, 33)), max_tokens=2)
    late = loop.launch()
    request = shares_of(late[0])[0].request
    loop.scheduler._retract(request)
    again = loop.launch()
    assert again[0].prefix_lens == [0]
    loop.process(late)
    assert request.num_written_tokens == 0
    assert loop.scheduler.kv.tree.num_cached == 0
    loop.process(again)
    assert request.num_written_tokens == 16
    loop.run()


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_request_whose_last_token_is_pending_is_not_admitted(max_tokens: int) -> None:
    """It may turn out to have ended."""
    loop = make_loop()
    loop.add("a", [1] * 6, max_tokens=max_tokens, ignore_eos=True)
    launched = loop.launch()
    loop.scheduler._retract(shares_of(launched[0])[0].request)
    assert loop.scheduler.schedule().shares == ()
    (output,) = loop.process(launched)
    assert output.token_ids
    assert (output.finish_reason is not None) == (max_tokens == 1)
    loop.run()


@pytest.mark.parametrize("steps", [1, 6, 40])
def test_the_ratio_is_estimated_from_what_was_generated(steps: int) -> None:
    loop = make_loop()
    for number in range(2):
        loop.add(f"r{number}", [number + 1] * 4, max_tokens=100, ignore_eos=True)
    for _ in range(steps):
        loop.step()
    ratio = NewTokenRatio()
    for running in (loop.scheduler._running.values(), []):  # of none it stays
        ratio.estimate(running)
        assert ratio.value == pytest.approx((steps + 20) / 100)
    victim = choose_victim(list(loop.scheduler._running.values()), by_priority=False)
    assert victim.name == "r1", "of equals the one that came last"
