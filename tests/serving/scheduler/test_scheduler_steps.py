"""What a step holds: decodes, chunks and prompts, in which order and how many tokens of each."""

import pytest
from fake_runner import make_loop, prompt_of, repeating, shares
from repository import TINY_MOE

from serving.options import resolve_keywords
from serving.scheduler import SchedulingPolicy
from serving.scheduler.request import shares_of
from ubatch import ConfigError, ForwardMode

Added = tuple[str, int, dict[str, object]]
"""A request that is added before a step: its name, the length of its prompt, its parameters."""


def ask(name: str, length: int, max_tokens: int = 4, **params: object) -> Added:
    return name, length, {"max_tokens": max_tokens, "ignore_eos": True, **params}


STEPS: dict[str, tuple[dict[str, object], list[tuple[list[Added], dict[str, int]]]]] = {
    "decodes and prompts mix": (
        {"max_num_batched_tokens": 32},
        [([ask("a", 10)], {"a": 10}), ([ask("b", 7)], {"a": 1, "b": 7}), ([], {"a": 1, "b": 1})],
    ),
    "prefill first keeps them apart": (
        {"max_num_batched_tokens": 32, "prefill_first": True},
        [([ask("a", 10)], {"a": 10}), ([ask("b", 40)], {"b": 32}), ([], {"b": 8}), ([], {"a": 1, "b": 1})],
    ),
    "nothing to do is a step without shares": ({}, [([], {})]),
    "nothing to do, prefill first": ({"prefill_first": True}, [([], {})]),
    "one prompt is cut at a time, and at pages": (
        {"max_num_batched_tokens": 30, "block_size": 8},
        [
            ([ask("a", 35), ask("b", 35)], {"a": 24}),  # 30 is within a page
            ([], {"a": 11, "b": 16}),
            ([], {"a": 1, "b": 19}),
        ],
    ),
    "a cut prompt that decodes crowd out lets nobody overtake": (
        {"max_num_batched_tokens": 8, "max_num_seqs": 8, "block_size": 8},
        [
            ([ask(name, 1, 3) for name in "defg"], dict.fromkeys("defg", 1)),
            ([ask("long", 20, 2), ask("short", 1, 2)], dict.fromkeys("defg", 1)),  # less than a page is left
            ([], dict.fromkeys("defg", 1)),
            ([], {"long": 8}),
            ([], {"long": 8}),
            ([], {"long": 4, "short": 1}),
        ],
    ),
    "a prompt of the same body does not pass the one that is cut": (
        {"max_num_batched_tokens": 64, "num_blocks": 256, "max_model_len": 256},
        [
            ([ask("long", 200, 1, group="body"), ask("tail", 2, 1, group="body"), ask("other", 2, 1)], {"long": 64}),
            ([], {"long": 60, "other": 2}),
            ([], {"long": 64}),
            ([], {"long": 12, "tail": 2}),
        ],
    ),
    "who is less urgent takes nothing from a prompt that is cut": (
        {"max_num_batched_tokens": 64, "num_blocks": 256, "max_model_len": 256, "policy": SchedulingPolicy.PRIORITY},
        [
            ([ask("long", 200, 1, priority=0)], {"long": 64}),
            ([ask("later", 2, 1, priority=1), ask("as urgent", 2, 1, priority=0)], {"long": 60, "as urgent": 2}),
        ],
    ),
    "without chunks a prompt waits for a step that holds it": (
        {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
        [([ask("a", 100, 2), ask("b", 60), ask("c", 10)], {"a": 100}), ([], {"a": 1, "b": 60, "c": 10})],
    ),
    "no more requests run than allowed": (
        {"max_num_seqs": 2},
        [
            ([ask(name, 5, 3) for name in "abc"], {"a": 5, "b": 5}),
            ([], {"a": 1, "b": 1}),
            ([], {"a": 1, "b": 1}),
            ([], {"c": 5}),
        ],
    ),
    "a step is planned before the last token is known": (
        {"overlapped": True},
        [([ask("a", 6, 3)], {"a": 6}), ([], {"a": 1}), ([], {"a": 1}), ([], {})],
    ),
}
"""Settings, and what is added before each step -> the tokens of each request in that step."""


@pytest.mark.parametrize(("config", "steps"), STEPS.values(), ids=STEPS)
def test_what_a_step_holds(config: dict[str, object], steps: list[tuple[list[Added], dict[str, int]]]) -> None:
    loop = make_loop(**config)  # type: ignore[arg-type]
    for number, (added, tokens) in enumerate(steps):
        for name, length, params in added:
            loop.add(name, prompt_of(length, start=ord(name[0]) % 49), **params)
        assert shares(loop.step()) == list(tokens.items()), f"step {number}"
    loop.run()


def test_pages_longer_than_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 16, below block_size \(32\)"):
        resolve_keywords(TINY_MOE, {"max_num_batched_tokens": 16, "block_size": 32})


def test_sampling_is_delayed_where_it_depends_on_the_tokens_before() -> None:
    loop = make_loop(max_num_batched_tokens=16, overlapped=True)
    loop.add("plain", prompt_of(4), max_tokens=20, ignore_eos=True)
    assert not loop.step().delay_sampling
    loop.add("penalised", prompt_of(20, 2), max_tokens=3, presence_penalty=1.0, ignore_eos=True)
    assert not loop.step().delay_sampling  # a chunk that does not sample
    assert loop.step().delay_sampling
    assert loop.step().delay_sampling
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
    loop.run()
    statistics = loop.scheduler.statistics()
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens
    assert len(loop.runner.steps) < 40  # one step a token would be more
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


def test_a_prefill_in_the_step_means_no_drafts() -> None:
    loop = make_loop(num_speculative_tokens=3, prompt_lookup_min=1, next_token=repeating)
    loop.add("a", [5, 6] * 8, max_tokens=40)
    loop.step()
    loop.add("b", [7, 8, 9], max_tokens=2)
    assert loop.step().mode is not ForwardMode.TARGET_VERIFY
    loop.run()


def test_drafts_stop_where_the_model_or_the_memory_does() -> None:
    loop = make_loop(
        num_blocks=5, max_model_len=20, num_speculative_tokens=3, prompt_lookup_min=1, next_token=lambda tokens: 3
    )
    loop.add("a", [3] * 6, max_tokens=100)
    loop.run()
    assert len(loop.tokens("a")) == 14
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
