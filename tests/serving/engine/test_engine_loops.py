"""The two loops: the same tokens, the order of their phases, and what the overlapped one gains on a virtual clock; and
over a real runner, on a CPU and on a GPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from dense_checkpoint import make_small
from engine_mains import core_over
from fake_device import DECLINED, ENGAGED, make_core, run
from fake_runner import VOCAB
from fake_runner import expected as expected_output
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner import FinishReason, ModelRunner, RequestError, SamplingParams, Step, StepOutput, step_runner
from serving.requests import RequestInput, RequestOutput
from serving.scheduler import SchedulerConfig
from ubatch import UBatchConfig

pytestmark = pytest.mark.long

NEW = 20
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 128}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 15]
MIXED = [
    SamplingParams(max_tokens=NEW, ignore_eos=True),
    SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.4, seed=4, top_k=60, top_p=0.9),
    SamplingParams(max_tokens=NEW - 7, ignore_eos=True, logprobs=2, logit_bias=((7, 3.0),)),
    SamplingParams(max_tokens=NEW - 3, ignore_eos=True, temperature=0.9, seed=5, min_p=0.01),
]
CONSTRAINED = [
    SamplingParams(max_tokens=NEW, ignore_eos=True, frequency_penalty=1.5, presence_penalty=1.0),
    SamplingParams(max_tokens=NEW - 5, ignore_eos=True, temperature=1.1, seed=6, repetition_penalty=1.5),
    SamplingParams(max_tokens=NEW, ignore_eos=True, min_tokens=4, stop_token_ids=(9,)),
    SamplingParams(max_tokens=NEW, ignore_eos=True),
]


def serve(runner: ModelRunner, params: Sequence[SamplingParams], *, overlap: bool) -> dict[str, list[int]]:
    """The tokens of all requests, by one of the two loops."""
    core = core_over(runner, overlap=overlap, **SMALL, enable_prefix_caching=False)
    return run(core, [RequestInput(str(n), prompt, params[n]) for n, prompt in enumerate(PROMPTS)])


@pytest.mark.sample(3)
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_loops_give_the_same_tokens(tmp_path: Path, device: str, dense: bool, lanes: bool) -> None:
    checkpoint = make_small(tmp_path, dense=dense)
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    with ModelRunner(checkpoint, device=device, num_kv_blocks=100, block_size=16, max_num_seqs=6, dbo=dbo) as runner:
        for params in (MIXED, CONSTRAINED):
            plain = serve(runner, params, overlap=False)
            assert serve(runner, params, overlap=True) == plain
            assert [len(plain[str(n)]) for n in range(4)] == [param.max_tokens for param in params]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pause_is_not_told_as_the_time_of_a_step(
    tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `auto` would take it for that of decodes alone: the last step before a pause is one of these."""
    clock = [100.0]

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    with ModelRunner(make_small(tmp_path, dense=True), num_kv_blocks=100, block_size=16, max_num_seqs=6) as runner:
        monkeypatch.setattr(step_runner.time, "perf_counter", tick)
        core = core_over(runner, overlap=overlap, **SMALL)
        process, periods = core.scheduler.process, []

        def recorded(step: Step, output: StepOutput) -> list[RequestOutput]:
            periods.append(output.decision.period_us)
            return process(step, output)

        monkeypatch.setattr(core.scheduler, "process", recorded)
        for number in range(4):
            clock[0] += 1000  # nothing to do
            run(core, [RequestInput(f"{number}", PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))])
        assert periods.count(0) == 4
        assert max(periods) < 1e6


LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def requests_of(params: Sequence[SamplingParams], length: int = 5) -> list[RequestInput]:
    return [
        RequestInput(f"r{index}", [(index * 7 + place) % VOCAB for place in range(length)], param)
        for index, param in enumerate(params)
    ]


def expected(requests: Sequence[RequestInput]) -> dict[str, list[int]]:
    return {request.request_id: expected_output(request.token_ids, request.params) for request in requests}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_are_those_of_the_model(overlap: bool) -> None:
    requests = requests_of([LONG, SamplingParams(max_tokens=1), SamplingParams(max_tokens=100), LONG])
    core, _, _ = make_core(overlap=overlap)
    assert run(core, requests) == expected(requests)


@pytest.mark.wide
@settings(max_examples=30)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 30),
            ignore_eos=st.booleans(),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 40),
    st.integers(30, 80),
    st.booleans(),
)
def test_both_loops_give_the_same_under_pressure(
    params: list[SamplingParams], length: int, blocks: int, prefill_first: bool
) -> None:
    requests = requests_of(params, length)
    config = SchedulerConfig(
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_chunked_prefill=True,
        prefill_first=prefill_first,
    )
    for overlap in (False, True):
        core, _, _ = make_core(overlap=overlap, blocks=blocks, config=config)
        assert run(core, requests) == expected(requests)


@pytest.mark.parametrize(("device_s", "host_s"), [(4.0, 1.0), (1.0, 4.0), (2.0, 2.0)])
def test_the_overlapped_loop_hides_the_shorter_of_the_two(device_s: float, host_s: float) -> None:
    requests = requests_of([LONG] * 4)
    plain, _, plain_clock = make_core(overlap=False, device_s=device_s, host_s=host_s)
    overlapped, _, overlapped_clock = make_core(overlap=True, device_s=device_s, host_s=host_s)
    assert run(plain, requests) == run(overlapped, requests)
    steps = LONG.max_tokens  # one prefill of all four, and the decodes
    assert plain_clock.now == pytest.approx(steps * (device_s + host_s))
    # The first step's scheduling has nothing to hide behind, nor has the last one's processing.
    bound = steps * max(device_s, host_s)
    assert bound - 1e-6 <= overlapped_clock.now <= bound + min(device_s, host_s) + 1e-6


def test_the_order_of_the_overlapped_loop() -> None:
    core, _, clock = make_core(overlap=True)
    run(core, requests_of([SamplingParams(max_tokens=3, ignore_eos=True)]))
    assert clock.log[:7] == ["launch 0", "sample 0", "launch 1", "sample 1", "result 0", "launch 2", "sample 2"]


def test_constrained_sampling_waits_for_the_step_before() -> None:
    """It depends on tokens that are known only then (`FakeStep` refuses it before). The forward does not wait."""
    core, _, clock = make_core(overlap=True, device_s=1.0, host_s=0.5)
    requests = requests_of([SamplingParams(max_tokens=3, ignore_eos=True, frequency_penalty=0.5)])
    assert run(core, requests) == expected(requests)
    assert clock.log[:7] == ["launch 0", "sample 0", "launch 1", "result 0", "sample 1", "launch 2", "result 1"]


def test_a_stop_token_drops_what_the_next_step_gave() -> None:
    """With the overlapped loop the step after it was launched before the stop was known."""
    prompt = next(p for p in ([a, b] for a in range(1, VOCAB) for b in range(VOCAB)) if len(short(p)) == 4)
    request = RequestInput("stops", prompt, SamplingParams(max_tokens=30))
    core, _, clock = make_core(overlap=True)
    assert run(core, [request]) == {"stops": short(prompt)}
    assert "launch 4" in clock.log


def short(prompt: list[int]) -> list[int]:
    return expected_output(prompt, SamplingParams(max_tokens=30))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_gives_nothing_more_and_frees_its_memory(overlap: bool) -> None:
    core, _, _ = make_core(overlap=overlap)
    kept, aborted = requests_of([LONG, LONG])
    core.add(kept)
    core.add(aborted)
    for _ in range(5):
        core.step()
    assert core.abort(aborted.request_id)
    assert not core.abort(aborted.request_id)
    seen = {output.request_id for output in core.step()}
    while core.has_work:
        seen |= {output.request_id for output in core.step()}
    assert seen == {kept.request_id}
    core.scheduler.check(idle=True)


def test_drain_finishes_the_step_in_flight_and_starts_none() -> None:
    core, _, clock = make_core(overlap=True)
    core.add(requests_of([LONG])[0])
    assert core.step() == []
    assert len(core.drain()) == 1
    assert core.drain() == []
    assert clock.log == ["launch 0", "sample 0", "result 0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_empty_step_tells_at_once_whether_all_ranks_are_idle(overlap: bool) -> None:
    core, device, _ = make_core(overlap=overlap)
    device.peers_busy = True
    core.step()
    assert not core.idle
    device.peers_busy = False
    core.step()
    assert core.idle
    core.add(requests_of([SamplingParams(max_tokens=1)])[0])
    outputs = core.step()
    assert not core.idle  # though with the overlapped loop its output is still to come
    outputs += core.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]


def test_statistics_count_steps_by_mode_and_outcome() -> None:
    core, device, _ = make_core(overlap=True)
    core.step()  # all idle: not counted
    device.peers_busy = True
    core.step()
    device.peers_busy = False
    decisions = iter([DECLINED, ENGAGED, ENGAGED, DECLINED])
    device.decide = lambda: next(decisions, DECLINED)
    run(core, requests_of([SamplingParams(max_tokens=4, ignore_eos=True)]))
    statistics = core.statistics()
    assert statistics.steps == {"idle/disabled": 1, "prefill/disabled": 1, "decode/engaged": 2, "decode/disabled": 1}
    assert statistics.generation_tokens == 4
    assert statistics.step_tokens[0] == len(requests_of([SamplingParams()])[0].token_ids) + 3
    assert sum(statistics.step_tokens[1:]) == 4  # steps without tokens of this rank are none of its iterations


def test_a_mixed_step_is_counted_as_one() -> None:
    core, _, _ = make_core(overlap=False)
    first, second = requests_of([LONG, LONG])
    core.add(first)
    core.step()
    core.add(second)
    core.step()
    assert core.statistics().steps == {"prefill/disabled": 1, "mixed/disabled": 1}


def test_a_request_that_cannot_be_served_is_refused_and_the_rest_goes_on() -> None:
    core, _, _ = make_core(overlap=True)
    with pytest.raises(RequestError, match="empty"):
        core.add(RequestInput("none", [], LONG))
    requests = requests_of([LONG])
    assert run(core, requests) == expected(requests)
