"""Both loops of an engine over a real runner give the same tokens, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dense_checkpoint import make_small
from engine_mains import core_over
from fake_device import run

from model_runner import ModelRunner, SamplingParams, Step, StepOutput, step_runner
from serving.requests import RequestInput, RequestOutput
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
