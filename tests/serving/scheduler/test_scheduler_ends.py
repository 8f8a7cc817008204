"""How requests begin and end: what is refused, what stops an output, aborts, and what the outputs say."""

import time

import pytest
from fake_runner import EOS, VOCAB, Loop, hashed, make_loop

from attention import KVCacheExhausted
from model_runner import FinishReason, RequestError, StepOutput
from serving.requests import EngineStatistics, StartTimes
from ubatch import Decision, UBatchError


def reason(loop: Loop, name: str) -> FinishReason | None:
    return loop.outputs[name][-1].finish_reason


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, RequestError, "the prompt of request 'x' is empty"),
        ([1, VOCAB], {}, RequestError, "the prompt of request 'x' has token 50; the vocabulary is 0 to 49"),
        ([-1], {}, RequestError, "has token -1"),
        ([1, 2.5], {}, RequestError, "the prompt of request 'x' has a float; a token is a Python int"),
        ([True], {}, RequestError, "the prompt of request 'x' has a bool"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, RequestError, "logit_bias of request 'x' has token 50"),
        ([1], {"stop_token_ids": (2, VOCAB)}, RequestError, "stop_token_ids of request 'x' has token 50"),
        ([1] * 128, {}, RequestError, r"has 128 tokens; with one of output that is more than max_model_len \(128\)"),
        ([1] * 33, {}, KVCacheExhausted, "has 33 tokens, the whole KV cache holds 32.*--kv-cache-memory"),
    ],
)
def test_what_can_never_be_served_is_refused(
    prompt: list[int], params: dict[str, object], error: type[Exception], message: str
) -> None:
    loop = make_loop(num_blocks=8)
    with pytest.raises(error, match=message):
        loop.add("x", prompt, **params)
    assert not loop.scheduler.has_work


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    loop = make_loop()
    loop.add("x", [1], max_tokens=1)
    with pytest.raises(RequestError, match="request 'x' is alive already"):
        loop.add("x", [2])
    loop.run()
    loop.add("x", [2], max_tokens=1)
    loop.run()


def test_a_result_of_another_step_is_refused() -> None:
    loop = make_loop()
    loop.add("x", [1])
    step = loop.scheduler.schedule()
    wrong = StepOutput((), (), (), Decision(False, None, None, ((0,),)), all_idle=True)
    with pytest.raises(UBatchError, match="a step of 1 shares gave tokens for 0"):
        loop.scheduler.process(step, wrong)


# -- ends -------------------------------------------------------------------------------------------------------------


def counting(tokens: list[int] | tuple[int, ...]) -> int:
    """20, 21, 22 and so on."""
    return 19 + len(tokens)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    ("params", "length", "why", "stop"),
    [
        ({"max_tokens": 5}, 5, FinishReason.LENGTH, None),
        ({"max_tokens": 1}, 1, FinishReason.LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": (23,)}, 4, FinishReason.STOP, 23),
        ({"max_tokens": 4, "stop_token_ids": (23,)}, 4, FinishReason.STOP, 23),
        ({"max_tokens": 9, "stop_token_ids": (20,)}, 1, FinishReason.STOP, 20),
        ({"max_tokens": 9, "stop_token_ids": (21, 23), "min_tokens": 3}, 4, FinishReason.STOP, 23),
        ({"max_tokens": 100}, 23, FinishReason.LENGTH, None),  # max_model_len
    ],
)
def test_what_ends_an_output(
    overlapped: bool, params: dict[str, object], length: int, why: FinishReason, stop: int | None
) -> None:
    loop = make_loop(max_model_len=24, next_token=counting, overlapped=overlapped)
    loop.add("x", [1], **params)
    loop.run()
    assert len(loop.tokens("x")) == length
    assert reason(loop, "x") is why
    assert loop.outputs["x"][-1].stop_token == stop


def test_the_end_of_sequence_token_counts_unless_ignored() -> None:
    loop = make_loop(next_token=lambda tokens: EOS)
    loop.add("heeds", [1], max_tokens=3)
    loop.add("ignores", [1], max_tokens=3, ignore_eos=True)
    loop.run()
    assert loop.tokens("heeds") == [EOS]
    assert loop.outputs["heeds"][0].stop_token == EOS
    assert loop.tokens("ignores") == [EOS] * 3
    assert reason(loop, "ignores") is FinishReason.LENGTH


def test_accepted_drafts_after_the_end_are_dropped() -> None:
    pattern = [4, 5, 6, 7]
    loop = make_loop(
        num_speculative_tokens=4, prompt_lookup_min=1, next_token=lambda tokens: pattern[len(tokens) % len(pattern)]
    )
    loop.add("stops", pattern * 3, max_tokens=30, stop_token_ids=(6,))
    loop.add("is cut", pattern * 3, max_tokens=3)
    loop.run()
    assert loop.tokens("stops") == [4, 5, 6]
    assert loop.outputs["stops"][-1].stop_token == 6
    assert loop.tokens("is cut") == [4, 5, 6]
    assert reason(loop, "is cut") is FinishReason.LENGTH


# -- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_at_once_and_nothing_follows(overlapped: bool, steps: int) -> None:
    loop = make_loop(max_num_batched_tokens=16, overlapped=overlapped)
    loop.add("x", [1] * 40, max_tokens=50, ignore_eos=True)
    loop.add("y", [2] * 4, max_tokens=6, ignore_eos=True)
    for _ in range(steps):
        loop.step()
    before = len(loop.outputs.get("x", ()))
    assert loop.abort("x")
    assert "x" not in loop.scheduler._running
    loop.scheduler.check()
    assert not loop.abort("x")
    assert not loop.abort("never heard of")
    loop.run()
    assert len(loop.outputs.get("x", ())) == before


# -- what is said -----------------------------------------------------------------------------------------------------


def test_prompt_logprobs_come_once_whole_and_with_the_first_token() -> None:
    loop = make_loop(max_num_batched_tokens=16)
    prompt = list(range(1, 41))
    loop.add("cached", prompt, max_tokens=1)
    loop.run()
    loop.add("x", prompt, max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    loop.run()
    assert loop.outputs["x"][0].num_cached_tokens == 0  # it was computed for them


def test_statistics_say_what_is_held_and_done() -> None:
    loop = make_loop(num_blocks=10, max_num_seqs=1)
    assert loop.scheduler.statistics() == EngineStatistics()
    loop.add("a", [1] * 6, max_tokens=3, ignore_eos=True)
    loop.add("b", [2] * 6, max_tokens=3, ignore_eos=True)
    loop.step()
    statistics = loop.scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (1, 1)
    assert statistics.kv_usage == pytest.approx(0.2)
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (6, 1)
    loop.run()
    statistics = loop.scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.kv_usage) == (0, 0, 0)
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (12, 6)
    assert statistics.prompt_tokens_cached == 0
    loop.add("c", [1] * 6, max_tokens=3, ignore_eos=True)
    loop.run()
    assert loop.scheduler.statistics().prompt_tokens_cached == 4


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_first_token_says_how_long_it_took(overlapped: bool) -> None:
    now = [0.0]
    loop = make_loop(
        max_num_seqs=1, max_num_batched_tokens=4, clock=lambda: now[0], overlapped=overlapped, checked=False
    )
    loop.add("a", [1] * 8, max_tokens=3, ignore_eos=True)
    now[0] = 0.25
    loop.add("b", [2] * 3, max_tokens=3, ignore_eos=True)
    while not {"a", "b"} <= loop.outputs.keys():
        now[0] += 1.0
        loop.step()
    loop.run()
    late = overlapped  # a step's tokens are known while the next one runs
    (first, *others) = [output.times for output in loop.outputs["a"]]
    assert (first, others) == (StartTimes(1.25, 1.0 + late), [None, None])
    (first, *others) = [output.times for output in loop.outputs["b"]]
    assert (first.prefilled_s, others) == (late, [None, None])
    assert first.queued_s >= 3  # the other one's three tokens


def test_a_step_of_64_decodes_costs_little() -> None:
    """Some 0.2 ms where nothing else runs; `ubatch bench engine` measures it. Ten times that is a mistake."""
    loop = make_loop(num_blocks=64 * 20, block_size=16, max_num_seqs=64, checked=False, next_token=lambda tokens: 3)
    for number in range(64):
        loop.add(f"r{number}", [number % 40] * 20, max_tokens=100)
    while loop.scheduler.num_waiting:
        loop.step()
    times = []
    for _ in range(40):
        start = time.process_time()
        loop.step()
        times.append(time.process_time() - start)
    assert sorted(times)[10] < 2e-3


def test_the_fake_runner_notices_kv_that_is_not_the_requests() -> None:
    loop = make_loop(next_token=hashed)
    loop.add("x", [1] * 6, max_tokens=3, ignore_eos=True)
    loop.step()
    loop.runner.slots[loop.runner.table.blocks(0)[0] * 4] = None
    with pytest.raises(AssertionError, match="x: the KV of token 0 is another's"):
        loop.step()
