"""Who is admitted when: policies, look-ahead, and prompts that begin alike."""

from __future__ import annotations

import pytest
from fake_runner import Loop, admitted, make_loop, shares

from serving.scheduler import SchedulingPolicy


def one_at_a_time(policy: SchedulingPolicy) -> Loop:
    return make_loop(max_num_seqs=1, policy=policy)


def order(loop: Loop) -> list[str]:
    names: list[str] = []
    while loop.scheduler.has_work:
        names += admitted(loop.step())
    return names


# -- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "expected"), [(SchedulingPolicy.FCFS, "abcd"), (SchedulingPolicy.PRIORITY, "bdca")])
def test_in_which_order_requests_are_admitted(policy: SchedulingPolicy, expected: str) -> None:
    """As they came; or the lowest priority number first, then as they came."""
    loop = one_at_a_time(policy)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        loop.add(name, [1], priority=priority, max_tokens=2)
    assert order(loop) == list(expected)


def test_the_longest_prefix_match_first() -> None:
    loop = one_at_a_time(SchedulingPolicy.LPM)
    loop.add("first", [1] * 12, max_tokens=2)
    loop.run()
    loop.add("none", [2] * 12, max_tokens=2)
    loop.add("some", [1] * 4 + [3] * 8, max_tokens=2)
    loop.add("most", [1] * 12 + [4], max_tokens=2)
    assert order(loop) == ["most", "some", "none"]


def test_a_poor_match_is_not_overtaken_for_ever() -> None:
    loop = one_at_a_time(SchedulingPolicy.LPM)
    loop.add("first", [1] * 12, max_tokens=1)
    loop.run()
    loop.add("poor", [2] * 12, max_tokens=1)
    ran: list[str] = []
    for number in range(400):
        loop.add(f"rich{number}", [1] * 12, max_tokens=1)
        ran += admitted(loop.step())
    assert "poor" in ran
    assert ran.index("poor") > 200
    loop.run()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_now_is_not_overtaken() -> None:
    loop = make_loop(num_blocks=16)
    loop.add("a", [1] * 40, max_tokens=3, ignore_eos=True)
    loop.step()
    loop.add("big", [2] * 40, max_tokens=3)
    loop.add("small", [3], max_tokens=3)
    assert admitted(loop.step()) == []
    while not (names := admitted(loop.step())):
        pass
    assert names == ["big", "small"]
    loop.run()


def test_room_is_kept_for_what_those_that_run_will_generate() -> None:
    def runs_beside(max_tokens: int) -> bool:
        loop = make_loop(num_blocks=16, max_num_batched_tokens=64)
        loop.add("a", [1] * 8, max_tokens=max_tokens, ignore_eos=True)
        loop.step()
        loop.add("b", [2] * 32, max_tokens=2)
        return admitted(loop.step()) == ["b"]

    assert runs_beside(20)  # 2 + 8 blocks of prompts and 0.7 * 22 tokens fit 16 blocks of 4
    assert not runs_beside(50)


@pytest.mark.long
def test_the_ratio_falls_while_things_go_well_and_starts_anew_when_idle() -> None:
    loop = make_loop(max_model_len=1024, num_blocks=256)
    ratio = loop.scheduler._prefills.ratio
    loop.add("a", [1], max_tokens=1000, ignore_eos=True)
    loop.step()
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        loop.step()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        loop.step()
    assert ratio.value == pytest.approx(0.098)
    loop.run()
    loop.step()
    assert ratio.value == pytest.approx(0.7)


# -- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_full_hit_computes_one_token_or_what_is_left_of_a_page() -> None:
    loop = make_loop()
    loop.add("a", [5] * 17, max_tokens=3, ignore_eos=True)
    loop.run()
    loop.add("again", [5] * 17, max_tokens=3, ignore_eos=True)
    assert shares(loop.step()) == [("again", 1)]
    loop.run()
    assert loop.outputs["again"][0].num_cached_tokens == 16
    loop.add("aligned", [5] * 16, max_tokens=3, ignore_eos=True)
    assert shares(loop.step()) == [("aligned", 4)]
    loop.run()
    statistics = loop.scheduler.statistics()
    assert (statistics.prefix_queries, statistics.prefix_hits) == (17 + 17 + 16, 16 + 12)
    assert statistics.prompt_tokens == 17 + 17 + 16


def test_outputs_are_prefixes_too() -> None:
    loop = make_loop()
    loop.add("a", [5] * 6, max_tokens=10, ignore_eos=True)
    loop.run()
    loop.add("b", [5] * 6 + loop.tokens("a"), max_tokens=3)
    loop.run()
    assert loop.outputs["b"][0].num_cached_tokens == 12  # of 15 that were computed, in whole pages


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_prefix_is_not_matched_before_it_is_written(overlapped: bool) -> None:
    loop = make_loop(overlapped=overlapped, block_size=16)  # shorter than is worth waiting for
    loop.add("a", [5] * 20, max_tokens=2, ignore_eos=True)
    loop.add("b", [5] * 20, max_tokens=2, ignore_eos=True)
    assert shares(loop.step()) == [("a", 20), ("b", 20)]
    loop.run()
    assert loop.outputs["b"][0].num_cached_tokens == 0
    assert loop.scheduler.kv.tree.num_cached == 1
    loop.add("c", [5] * 20, max_tokens=2)
    loop.run()
    assert loop.outputs["c"][0].num_cached_tokens == 16


@pytest.mark.parametrize("overlapped", [False, True])
def test_prompts_that_begin_alike_are_computed_once(overlapped: bool) -> None:
    loop = make_loop(overlapped=overlapped, max_num_batched_tokens=64, num_blocks=256)
    shared = [number % 49 + 1 for number in range(100)]
    for number in range(6):
        loop.add(f"r{number}", [*shared, number], max_tokens=4, ignore_eos=True)
    loop.add("other", [7] * 10, max_tokens=4, ignore_eos=True)
    assert admitted(loop.step()) == ["r0"]
    assert admitted(loop.step()) == ["r0", "other"]  # who begins otherwise does not wait
    loop.run()
    statistics = loop.scheduler.statistics()
    assert statistics.prefix_queries - statistics.prefix_hits == 101 + 5 + 10


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_who_waits_for_a_prefix_goes_on_when_its_writer_is_gone(end: str) -> None:
    loop = make_loop(max_num_batched_tokens=64, num_blocks=256)
    for name in ("a", "b", "c"):
        loop.add(name, [number % 49 + 1 for number in range(100)], max_tokens=1)
    assert admitted(loop.step()) == ["a"]
    if end == "abort":
        loop.abort("a")
        assert admitted(loop.step()) == ["b"]
    loop.run()
    assert set(loop.outputs) >= {"b", "c"}
    # What the first had written was not computed again.
    statistics = loop.scheduler.statistics()
    assert statistics.prefix_hits == (64 + 96 if end == "abort" else 96 + 96)


def test_without_a_prefix_cache_nobody_waits_for_a_prefix() -> None:
    loop = make_loop(max_num_batched_tokens=128, enable_prefix_caching=False)
    for name in ("a", "b"):
        loop.add(name, [5] * 50, max_tokens=1)
    assert admitted(loop.step()) == ["a", "b"]
    loop.run()
    statistics = loop.scheduler.statistics()
    assert (statistics.prefix_queries, statistics.prompt_tokens) == (0, 100)
