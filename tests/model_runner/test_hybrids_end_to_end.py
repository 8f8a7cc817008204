"""Models with linear attention, through the server's scheduler and over ranks, give transformers' tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy
from fake_device import run
from fake_proposer import FakeProposer

from attention import KVCacheError
from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, check_tensor_parallel, generate
from model_runner.memory.memory_profile import CudaMemory
from serving.engine import EngineCore
from serving.engine.speculation import Algorithm, SpeculationConfig, make_scheduler, runner_options
from serving.requests import RequestInput
from serving.scheduler import SchedulerConfig
from ubatch import ConfigError, UBatchConfig

NEW = 7
EAGER = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}


def prompts_of(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(131) for _ in range(length)] for length in lengths]


def expected_of(path: Path, prompts: list[list[int]], count: int = NEW) -> list[list[int]]:
    reference = load_reference(path)
    return [reference_greedy(reference, prompt, count)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {family: make_checkpoint(folder / family, family) for family in ("Qwen3Next", "Qwen3_5Moe")}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_any_setting_of_the_scheduler_gives_the_same_tokens(
    paths: dict[str, Path], seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, mixed steps, retraction, requests that begin alike, drafts, one to three lanes."""
    rng, path = random.Random(seed), paths[("Qwen3Next", "Qwen3_5Moe")[seed % 2]]
    crowded, speculation = seed in (2, 4), SpeculationConfig(Algorithm.NGRAM, 3) if seed in (0, 4) else None
    prompts = prompts_of(seed, (5, 9, 7, 20, 3, 8, 9, 9) if crowded else (70, 1, 9, 33, 20, 5))
    prompts += [[*prompts[0][:40], 1, 2, 3], prompts[3]]
    block, most = rng.choice([2, 4]), 10 if crowded else rng.choice([4, 6])
    config = SchedulerConfig(
        max_num_seqs=most,
        max_num_batched_tokens=rng.choice([12, 30, 300]),
        max_model_len=90,
        prefill_first=rng.random() < 0.5,
    )
    dbo = UBatchConfig(
        dbo_decode_token_threshold=3,
        dbo_prefill_token_threshold=3,
        num_ubatches=2 + seed % 2,
        split_by=rng.choice(["tokens", "cost"]),
        enable_dbo=seed != 3,
    )
    new = 50 if crowded else NEW
    expected = expected_of(path, prompts, new)

    def right_one(request: Request, tokens: Sequence[int]) -> int:
        number = int(str(request.request_id))
        return [*expected[number], 0, 0, 0][len(tokens) - len(prompts[number])]

    monkeypatch.setattr("serving.engine.speculation.make_proposer", lambda *_: FakeProposer(right_one, vocab_size=131))
    room = {"num_kv_blocks": 100 // block, "block_size": block, "max_num_seqs": most, "max_model_len": 90}
    with ModelRunner(path, dbo=dbo, **room, **runner_options(speculation)) as runner:
        with caplog.at_level("INFO"):
            scheduler = make_scheduler(config, speculation, runner)
        assert "prefix cache off" in caplog.text
        core = EngineCore(runner, scheduler, overlap_schedule=seed % 2 == 1)
        greedy = SamplingParams(max_tokens=new, ignore_eos=True)
        got = run(core, [RequestInput(str(n), prompt, greedy) for n, prompt in enumerate(prompts)])
        statistics = scheduler.statistics()
        scheduler.check(idle=True)
        assert (runner.statistics().engaged > NEW) == dbo.enable_dbo
    assert [got[str(n)] for n in range(len(prompts))] == expected
    assert statistics.prefix_hits == 0
    assert (statistics.preemptions > 0) == crowded
    assert (statistics.accepted_tokens > 0) == (speculation is not None)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [1, 2])
def test_no_state_sees_a_rejected_draft(paths: dict[str, Path], lanes: int) -> None:
    """Drafts that are wrong, right in part, and all right, between plain steps; requests come and go."""
    path = paths["Qwen3_5Moe"]
    prompts = prompts_of(5, (20, 1, 9, 33))
    expected = expected_of(path, prompts, 30)
    rng = random.Random(lanes)
    accepted = set()
    dbo = UBatchConfig(**EAGER, require_overlap=True) if lanes == 2 else UBatchConfig(enable_dbo=False)
    with ModelRunner(path, num_kv_blocks=64, num_speculative_tokens=3, max_num_seqs=4, dbo=dbo) as runner:
        requests = [Request(number, prompt, SamplingParams()) for number, prompt in enumerate(prompts)]
        for request in requests:
            runner.admit(request, 90)
        for step in range(16):
            if step == 8:  # starts over, in the slot of another one
                for request in requests[:2]:
                    runner.release(request)
                for request in requests[:2]:
                    runner.admit(request, 90)
            plain = any(request.num_uncomputed_tokens > 1 for request in requests) or rng.random() < 0.3
            shares, right = [], []
            for request, tokens in zip(requests, expected, strict=True):
                if plain:
                    shares.append(ScheduledRequest(request, request.num_uncomputed_tokens))
                    right.append(0)
                    continue
                here = tokens[request.num_output_tokens :][:3]
                right.append(rng.randint(0, 3))
                drafts = [token if place < right[-1] else (token + 1) % 131 for place, token in enumerate(here)]
                shares.append(ScheduledRequest(request, 1, tuple(drafts)))
            output = runner.execute(shares)
            for request, share, tokens, count, wanted in zip(
                requests, shares, output.tokens, right, expected, strict=True
            ):
                start = request.num_output_tokens
                assert list(tokens) == wanted[start : start + count + 1], step
                accepted.add(count)
                request.num_computed_tokens += share.num_tokens + count
                request.token_ids += tokens
                assert request.num_uncomputed_tokens == 1
            if min(30 - request.num_output_tokens for request in requests) < 5:
                break
        assert (runner.statistics().engaged > 0) == (lanes == 2)
    assert accepted == {0, 1, 2, 3}


def test_a_checkpoint_that_can_see_runs_without_its_eyes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers
    from checkpoints import FAMILIES

    torch.manual_seed(0)
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.Qwen3_5MoeConfig(text_config=dict(FAMILIES["Qwen3_5Moe"]), vision_config=eyes)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = prompts_of(3, (19,))[0]
    with caplog.at_level("INFO"), ModelRunner(tmp_path, num_kv_blocks=16) as runner:
        (got,) = generate(runner, [prompt], SamplingParams(max_tokens=NEW))
    assert list(got.token_ids) == reference_greedy(model, prompt, NEW)[0]
    assert "vision tower, which is not served" in caplog.text


def test_what_a_state_cannot_do_is_refused(paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"2 layers of this model have linear attention.* a tree of drafts"):
        ModelRunner(paths["Qwen3Next"], num_kv_blocks=16, num_speculative_tokens=2, speculative_trees=True)
    with ModelRunner(paths["Qwen3Next"], num_kv_blocks=16) as runner:
        with pytest.raises(ConfigError, match="does not divide the 2 key heads of its linear attention"):
            check_tensor_parallel(runner.config, 4)
        request = Request(0, [1, 2, 3, 4], SamplingParams())
        runner.admit(request, 16)
        share = ScheduledRequest(request, 2)
        runner.execute([share])
        request.advance(2, None)
        request.num_computed_tokens = 3  # as if a page had been found in a prefix cache
        with pytest.raises(KVCacheError, match=r"begins at token 3 .* have seen 2"):
            runner.execute([ScheduledRequest(request, 1)])


def test_states_take_their_part_of_a_gpus_memory(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before memory is measured, so the KV cache gets what they leave."""
    held: list[int] = []

    def measured(runner: ModelRunner, *_: object) -> int:
        held.append(0 if runner.states is None else runner.states.nbytes)
        return 16

    monkeypatch.setattr("model_runner.runner.measured_blocks", measured)
    with ModelRunner(
        paths["Qwen3Next"],
        gpu_memory_utilization=0.5,
        memory=CudaMemory(torch.device("cpu")),
        max_num_seqs=5,
        num_speculative_tokens=2,
        num_state_snapshots=4,
    ) as runner:
        assert runner.kv_cache.spec.num_layers == 1
    window, state, kept = 3 * 80 * 4, 4 * 8 * 12 * 4, 3 * (80 + 8) * 4
    assert held == [2 * (5 * (window + state + kept) + 4 * (window + state))]
