"""What a step holds: decodes, chunks and prompts, in which order and how many tokens of each."""

from __future__ import annotations

import pytest
from fake_runner import expected, make_loop, repeating
from repository import TINY_MOE

from model_runner import SamplingParams, Step
from serving.options import resolve_keywords
from serving.scheduler.request import shares_of
from ubatch import ConfigError, ForwardMode


def shares(step: Step) -> list[tuple[str, int]]:
    return [(str(share.request.request_id), share.num_tokens) for share in step.shares]


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * place) % 49 + 1 for place in range(length)]


def test_steps_mix_decodes_and_prompts() -> None:
    loop = make_loop(max_num_batched_tokens=32)
    loop.add("a", prompt(10), max_tokens=4, ignore_eos=True)
    assert shares(loop.step()) == [("a", 10)]
    loop.add("b", prompt(7, 2), max_tokens=4, ignore_eos=True)
    assert shares(loop.step()) == [("a", 1), ("b", 7)]
    assert shares(loop.step()) == [("a", 1), ("b", 1)]
    loop.run()
    assert loop.tokens("b") == expected(prompt(7, 2), SamplingParams(max_tokens=4, ignore_eos=True))


def test_prefill_first_keeps_them_apart() -> None:
    loop = make_loop(max_num_batched_tokens=32, prefill_first=True)
    loop.add("a", prompt(10), max_tokens=4, ignore_eos=True)
    assert shares(loop.step()) == [("a", 10)]
    loop.add("b", prompt(40, 2), max_tokens=4, ignore_eos=True)
    assert shares(loop.step()) == [("b", 32)]
    assert shares(loop.step()) == [("b", 8)]
    assert shares(loop.step()) == [("a", 1), ("b", 1)]
    loop.run()


@pytest.mark.parametrize("prefill_first", [False, True])
def test_nothing_to_do_is_a_step_without_shares(prefill_first: bool) -> None:
    loop = make_loop(prefill_first=prefill_first)
    assert loop.step().shares == ()
    assert not loop.scheduler.has_work
    loop.run()


def test_one_prompt_is_cut_at_a_time_and_at_pages() -> None:
    loop = make_loop(max_num_batched_tokens=30, block_size=8)
    for name, start in (("a", 1), ("b", 2)):
        loop.add(name, prompt(35, start), max_tokens=3, ignore_eos=True)
    assert shares(loop.step()) == [("a", 24)]  # 30 is within a page
    assert shares(loop.step()) == [("a", 11), ("b", 16)]
    assert shares(loop.step()) == [("a", 1), ("b", 19)]
    loop.run()


def test_a_cut_prompt_that_decodes_crowd_out_lets_nobody_overtake() -> None:
    loop = make_loop(max_num_batched_tokens=8, max_num_seqs=8, block_size=8)
    for number in range(4):
        loop.add(f"d{number}", [number + 1], max_tokens=3, ignore_eos=True)
    loop.step()
    loop.add("long", prompt(20), max_tokens=2)
    loop.add("short", [30], max_tokens=2)
    # Four decodes leave less than a page.
    assert shares(loop.step()) == [(f"d{number}", 1) for number in range(4)]
    loop.step()
    assert shares(loop.step()) == [("long", 8)]
    assert shares(loop.step()) == [("long", 8)]
    assert shares(loop.step()) == [("long", 4), ("short", 1)]
    loop.run()


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it() -> None:
    loop = make_loop(max_num_batched_tokens=128, enable_chunked_prefill=False)
    loop.add("a", prompt(100), max_tokens=2, ignore_eos=True)
    loop.add("b", prompt(60, 2), max_tokens=2, ignore_eos=True)
    loop.add("c", prompt(10, 3), max_tokens=2, ignore_eos=True)
    assert shares(loop.step()) == [("a", 100)]
    assert shares(loop.step()) == [("a", 1), ("b", 60), ("c", 10)]
    loop.run()


def test_no_more_requests_run_than_allowed() -> None:
    loop = make_loop(max_num_seqs=2)
    for number in range(3):
        loop.add(f"r{number}", prompt(5, number), max_tokens=3, ignore_eos=True)
    assert shares(loop.step()) == [("r0", 5), ("r1", 5)]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    loop.step()
    loop.step()
    assert shares(loop.step()) == [("r2", 5)]
    loop.run()


def test_pages_longer_than_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 16, below block_size \(32\)"):
        resolve_keywords(TINY_MOE, {"max_num_batched_tokens": 16, "block_size": 32})


def test_sampling_is_delayed_where_it_depends_on_the_tokens_before() -> None:
    loop = make_loop(max_num_batched_tokens=16, overlapped=True)
    loop.add("plain", prompt(4), max_tokens=20, ignore_eos=True)
    assert not loop.step().delay_sampling
    loop.add("penalised", prompt(20, 2), max_tokens=3, presence_penalty=1.0, ignore_eos=True)
    assert not loop.step().delay_sampling  # a chunk that does not sample
    assert loop.step().delay_sampling
    assert loop.step().delay_sampling
    loop.run()
    for name, start, length, most in (("plain", 1, 4, 20), ("penalised", 2, 20, 3)):
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        assert loop.tokens(name) == expected(prompt(length, start), params)


def test_in_the_overlap_loop_a_step_is_planned_before_the_last_token_is_known() -> None:
    loop = make_loop(overlapped=True)
    loop.add("a", prompt(6), max_tokens=3, ignore_eos=True)
    loop.step()
    assert shares(loop.step()) == [("a", 1)]
    assert len(loop.tokens("a")) == 1
    assert shares(loop.step()) == [("a", 1)]
    assert loop.step().shares == ()  # its three tokens are on their way
    assert not loop.scheduler.has_work
    loop.run()


# -- speculation ------------------------------------------------------------------------------------------------------


def test_all_shares_of_a_verify_step_have_equally_many_drafts() -> None:
    loop = make_loop(num_speculative_tokens=3, prompt_lookup_min=1, next_token=repeating)
    loop.add("a", [5, 6] * 8, max_tokens=40)
    loop.add("b", [7, 8, 9], max_tokens=40)
    loop.step()
    verified = 0
    while loop.scheduler.has_work:
        step = loop.step()
        if step.mode is ForwardMode.TARGET_VERIFY:
            verified += 1
            (count,) = {len(share.drafts) for share in step.shares}
            assert count == max(share.num_drafted for share in shares_of(step)) <= 3
            assert [share.num_tokens for share in step.shares] == [1] * len(step.shares)
    assert verified
    for name, given in (("a", [5, 6] * 8), ("b", [7, 8, 9])):
        assert loop.tokens(name) == expected(given, SamplingParams(max_tokens=40), next_token=repeating)
    statistics = loop.scheduler.statistics()
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens
    assert loop.runner.num_steps < 40  # one step a token would be more
    assert statistics.generation_tokens == 80


def test_drafts_that_only_fill_up_are_not_counted() -> None:
    loop = make_loop(num_speculative_tokens=2, next_token=lambda tokens: len(tokens) % 40 + 1)
    loop.add("guessed", [3, 4] * 4, max_tokens=3)  # never right
    loop.add("unknown", [9], max_tokens=3)
    loop.step()
    step = loop.step()
    assert step.mode is not ForwardMode.TARGET_VERIFY  # 9 does not repeat anything, and the last of the other's neither
    loop.run()
    again = make_loop(num_speculative_tokens=2, prompt_lookup_min=1, next_token=lambda tokens: 3)
    again.add("guessed", [3, 4] * 4, max_tokens=4)
    again.add("unknown", [9], max_tokens=4)
    again.step()
    step = again.step()
    assert step.mode is ForwardMode.TARGET_VERIFY
    assert [share.num_drafted for share in shares_of(step)] == [2, 0]
    assert step.shares[1].drafts == (3, 3)
    again.run()
    assert again.scheduler.statistics().drafted_tokens < 2 * again.scheduler.statistics().generation_tokens


@pytest.mark.parametrize(("fill", "counts"), [(False, {0, 1, 3}), (True, {0, 3})])
def test_drafts_can_be_filled_up_to_the_most_there_may_be(fill: bool, counts: set[int]) -> None:
    """So that all verify steps have one size; where nothing was guessed the step is a plain one."""
    loop = make_loop(num_speculative_tokens=3, prompt_lookup_min=1, fill_drafts=fill, next_token=repeating)
    loop.add("a", [5, 6, 1], max_tokens=20, ignore_eos=True)
    loop.run()
    assert {drafts for step in loop.runner.steps for _, _, drafts in step} == counts
    wanted = SamplingParams(max_tokens=20, ignore_eos=True)
    assert loop.tokens("a") == expected([5, 6, 1], wanted, next_token=repeating)


def test_a_prefill_in_the_step_means_no_drafts() -> None:
    loop = make_loop(num_speculative_tokens=3, prompt_lookup_min=1, next_token=repeating)
    loop.add("a", [5, 6] * 8, max_tokens=40)
    loop.step()
    loop.add("b", [7, 8, 9], max_tokens=2)
    assert loop.step().mode is not ForwardMode.TARGET_VERIFY
    loop.run()


def test_drafts_stop_where_the_model_or_the_memory_does() -> None:
    most = SamplingParams(max_tokens=100)
    loop = make_loop(
        num_blocks=5, max_model_len=20, num_speculative_tokens=3, prompt_lookup_min=1, next_token=lambda tokens: 3
    )
    loop.add("a", [3] * 6, max_tokens=100)
    loop.run()
    assert loop.tokens("a") == expected([3] * 6, most, limit=20, next_token=lambda tokens: 3)
    assert loop.scheduler.statistics().accepted_tokens > 0


def test_one_near_its_end_limits_the_drafts_of_all() -> None:
    loop = make_loop(max_model_len=20, num_speculative_tokens=3, prompt_lookup_min=1, next_token=lambda tokens: 3)
    loop.add("near", [3] * 17, max_tokens=100)
    loop.add("far", [3] * 4, max_tokens=100)
    loop.step()
    step = loop.step()
    assert step.mode is ForwardMode.TARGET_VERIFY
    assert [len(share.drafts) for share in step.shares] == [2, 2]  # 18 tokens, and 20 places
    assert [share.num_drafted for share in shares_of(step)] == [1, 2]
    loop.run()
    assert (len(loop.tokens("near")), len(loop.tokens("far"))) == (3, 16)


def test_drafts_do_not_outgrow_a_step() -> None:
    loop = make_loop(
        num_speculative_tokens=3, max_num_batched_tokens=8, max_num_seqs=4, prompt_lookup_min=1, next_token=lambda t: 3
    )
    for number in range(4):
        loop.add(f"r{number}", [3, 3], max_tokens=9)
    while loop.scheduler.has_work:
        assert loop.step().num_tokens <= 8
    assert loop.scheduler.statistics().accepted_tokens > 0
