"""Who is admitted when: policies, look-ahead, and prompts that begin alike; and who gives way when KV is short."""

import pytest
from fake_runner import Loop, admitted, be_optimistic, make_loop, shares

from model_runner import FinishReason
from serving.scheduler import SchedulingPolicy
from serving.scheduler.prefills import NewTokenRatio, choose_victim
from serving.scheduler.request import shares_of


def order(loop: Loop) -> list[str]:
    names: list[str] = []
    while loop.scheduler.has_work:
        names += admitted(loop.step())
    return names


# -- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "added", "expected"),
    [
        (SchedulingPolicy.FCFS, "a2 b0 c1 d0", "a b c d"),
        (SchedulingPolicy.PRIORITY, "a2 b0 c1 d0", "b d c a"),
        (SchedulingPolicy.PRIORITY, "a1 aa1 b1 c0 cc0", "c cc a b aa"),  # of each body one, within a priority
    ],
)
def test_in_which_order_requests_are_admitted(policy: SchedulingPolicy, added: str, expected: str) -> None:
    """As they came; or the lowest priority number first, then as they came. A name's letter is its body's."""
    loop = make_loop(max_num_seqs=1, policy=policy)
    for each in added.split():
        loop.add(each[:-1], [1], priority=int(each[-1]), group=each[0], max_tokens=2)
    assert order(loop) == expected.split()


def test_the_longest_prefix_match_first() -> None:
    loop = make_loop(max_num_seqs=1, policy=SchedulingPolicy.LPM)
    loop.add("first", [1] * 12, max_tokens=2)
    loop.run()
    loop.add("none", [2] * 12, max_tokens=2)
    loop.add("some", [1] * 4 + [3] * 8, max_tokens=2)
    loop.add("most", [1] * 12 + [4], max_tokens=2)
    assert order(loop) == ["most", "some", "none"]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_poor_match_is_not_overtaken_for_ever() -> None:
    loop = make_loop(policy=SchedulingPolicy.LPM, max_num_seqs=1)
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


# -- KV pressure: who gives way, how it comes back, and who stays ------------------------------------------------------


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
