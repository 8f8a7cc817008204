"""KV pressure: who gives way, how it comes back, and who stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_runner import Loop, expected, make_loop

from model_runner import FinishReason, SamplingParams
from serving.scheduler import SchedulingPolicy
from serving.scheduler.admission.retraction import NewTokenRatio, choose_victim
from serving.scheduler.request import shares_of


def optimistic(loop: Loop) -> Loop:
    """Keep no KV for outputs."""
    loop.scheduler._prefills.ratio = SimpleNamespace(  # type: ignore[assignment]
        decay=lambda: None, reset=lambda: None, estimate=lambda running: None, tokens=lambda requests: 0
    )
    return loop


def running(loop: Loop) -> list[str]:
    return list(loop.scheduler._running)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_retracted_request_comes_back_and_gives_the_same_tokens(overlapped: bool, caching: bool) -> None:
    loop = optimistic(make_loop(num_blocks=12, overlapped=overlapped, enable_prefix_caching=caching))
    prompts = {f"r{number}": [number + 1] * 10 for number in range(4)}
    for name, prompt in prompts.items():
        loop.add(name, prompt, max_tokens=30, ignore_eos=True)
    preemptions = 0
    while loop.scheduler.has_work:
        step = loop.step()
        loop.scheduler.check()
        if loop.scheduler.statistics().preemptions > preemptions:
            assert not any(share.prefill for share in shares_of(step))  # else it would be admitted again at once
        preemptions = loop.scheduler.statistics().preemptions
    loop.run()
    assert preemptions >= 3
    for name, prompt in prompts.items():
        assert loop.tokens(name) == expected(prompt, SamplingParams(max_tokens=30, ignore_eos=True))


def test_the_fewest_outputs_and_the_longest_prompt_give_way() -> None:
    loop = optimistic(make_loop(num_blocks=12))
    loop.add("old", [1] * 5, max_tokens=40, ignore_eos=True)
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
    loop = optimistic(make_loop(num_blocks=8, policy=SchedulingPolicy.PRIORITY))
    loop.add("unimportant", [1] * 5, priority=9, max_tokens=40, ignore_eos=True)
    for _ in range(4):
        loop.step()
    loop.add("important", [2] * 6, priority=0, max_tokens=40, ignore_eos=True)
    while "unimportant" in running(loop):
        loop.step()
    assert running(loop) == ["important"]
    loop.run()


def test_what_was_written_is_not_computed_again_if_it_is_still_there() -> None:
    loop = optimistic(make_loop(num_blocks=8))
    loop.add("a", [1] * 10, max_tokens=12, ignore_eos=True)
    loop.add("b", [2] * 10, max_tokens=12, ignore_eos=True)
    while loop.scheduler.statistics().preemptions == 0:
        loop.step()
    (waiting,) = loop.scheduler._waiting
    assert len(loop.scheduler.kv.lookup(waiting).blocks) > 0
    assert waiting.retracted
    loop.run()


def test_an_output_ends_where_the_whole_cache_does_however_many_run() -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    loop = optimistic(make_loop(num_blocks=8))
    for name, token in (("a", 1), ("b", 2)):
        loop.add(name, [token] * 10, max_tokens=100, ignore_eos=True)
    loop.run()
    for name, token in (("a", 1), ("b", 2)):
        assert loop.tokens(name) == expected([token] * 10, params, limit=33)
        assert loop.outputs[name][-1].finish_reason is FinishReason.LENGTH


def test_a_prompt_that_fills_the_cache_gives_one_token() -> None:
    loop = make_loop(num_blocks=8)
    loop.add("a", [1] * 32, max_tokens=100, ignore_eos=True)
    loop.run()
    assert loop.tokens("a") == expected([1] * 32, SamplingParams(max_tokens=1, ignore_eos=True))


def test_the_last_one_is_not_retracted_for_those_that_are_done() -> None:
    """In the overlap loop a request may hold its blocks only until its last token is known."""
    loop = optimistic(make_loop(num_blocks=4, overlapped=True))
    loop.add("done", [1] * 7, max_tokens=1, ignore_eos=True)
    loop.add("goes on", [2] * 8, max_tokens=6, ignore_eos=True)
    while loop.scheduler.has_work:
        loop.step()
    loop.run()
    assert loop.scheduler.statistics().preemptions == 0
    assert loop.tokens("goes on") == expected([2] * 8, SamplingParams(max_tokens=6, ignore_eos=True))


def test_a_late_result_of_an_earlier_life_brings_no_kv() -> None:
    loop = make_loop(max_num_batched_tokens=16)
    scheduler, runner = loop.scheduler, loop.runner
    loop.add("a", list(range(1, 33)), max_tokens=2)
    late = scheduler.schedule()
    pending = runner.launch(late.shares)
    scheduler.advance(late)
    pending.sample()
    request = shares_of(late)[0].request
    scheduler._retract(request)
    again = scheduler.schedule()
    assert again.prefix_lens == [0]
    scheduler.process(late, pending.result())
    assert request.num_written_tokens == 0
    assert scheduler.kv.tree.num_cached == 0
    pending = runner.launch(again.shares)
    scheduler.advance(again)
    pending.sample()
    scheduler.process(again, pending.result())
    assert request.num_written_tokens == 16
    loop.run()


def test_a_request_whose_last_token_is_pending_is_not_admitted() -> None:
    loop = make_loop()
    scheduler, runner = loop.scheduler, loop.runner
    loop.add("a", [1] * 6, max_tokens=3, ignore_eos=True)
    step = scheduler.schedule()
    pending = runner.launch(step.shares)
    scheduler.advance(step)
    pending.sample()
    scheduler._retract(shares_of(step)[0].request)
    assert scheduler.schedule().shares == ()
    (output,) = scheduler.process(step, pending.result())
    assert output.token_ids
    loop.run()
    assert [*output.token_ids, *loop.tokens("a")] == expected([1] * 6, SamplingParams(max_tokens=3, ignore_eos=True))


def test_one_that_was_retracted_may_turn_out_to_have_ended() -> None:
    loop = make_loop()
    scheduler, runner = loop.scheduler, loop.runner
    loop.add("a", [1] * 6, max_tokens=1)
    step = scheduler.schedule()
    pending = runner.launch(step.shares)
    scheduler.advance(step)
    pending.sample()
    scheduler._retract(shares_of(step)[0].request)
    (output,) = scheduler.process(step, pending.result())
    assert output.finish_reason is not None
    scheduler.check(idle=True)


def test_the_ratio_is_estimated_from_what_was_generated() -> None:
    loop = make_loop()
    for number in range(2):
        loop.add(f"r{number}", [number + 1] * 4, max_tokens=100, ignore_eos=True)
    for _ in range(6):
        loop.step()
    ratio = NewTokenRatio()
    ratio.estimate(loop.scheduler._running.values())
    assert ratio.value == pytest.approx(2 * (6 + 20) / 200)
    ratio.estimate([])
    assert ratio.value == pytest.approx(2 * (6 + 20) / 200)
    victim = choose_victim(list(loop.scheduler._running.values()), by_priority=False)
    assert victim.name == "r1"  # of equals the one that came last
    loop.run()
