"""A model runner's steps as if on a GPU: prefill and decode of real models on two ranks, every named schedule."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fake_cuda import FakeCuda

from model_runner import ModelRunner, SamplingParams, generate
from ranks import run_ranks
from ubatch import CommGroup, UBatchConfig

pytestmark = pytest.mark.ranks

STEPS = 2
LOW = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
ARMS: dict[str, dict[str, Any]] = {
    "mlp_shared_overlap": {},
    "two_batch_prefill": {"all2all_backend": "allgather_reducescatter"},
    "two_batch_decode": {},
}


def generate_under_watch(rank: int, world_size: int, paths: dict[str, list[str]]) -> None:
    group = CommGroup.from_process_group(timeout_s=20)
    for path, schedules in paths.items():
        for schedule in schedules:
            generate_in_lanes(rank, group, path, schedule)


def generate_in_lanes(rank: int, group: CommGroup, path: str, name: str) -> None:
    prompts = [[7 + rank] * length for length in (5, 9, 3 + rank)]
    params = [SamplingParams(max_tokens=STEPS)] * len(prompts)
    arm = ARMS[name]
    dbo = UBatchConfig(**LOW, schedule=name)
    with ModelRunner(path, group=group, num_kv_blocks=64, block_size=4, dbo=dbo, **arm) as runner:
        with FakeCuda().installed() as cuda:
            watched = generate(runner, prompts, params)
        assert runner.statistics().engaged == STEPS, runner.statistics()
    cuda.check(name)
    assert cuda.counts["nccl"] > 0
    with ModelRunner(path, group=group, num_kv_blocks=64, block_size=4, dbo=UBatchConfig(enable_dbo=False)) as plain:
        expected = generate(plain, prompts, params)
    assert [each.token_ids for each in watched] == [each.token_ids for each in expected]


def test_models(tmp_path: Path) -> None:
    """Grouped-query attention under every schedule, latent attention and shared experts under one."""
    families = {"Qwen3Moe": list(ARMS), "DeepseekV3": ["two_batch_decode"]}
    paths = {
        str(make_checkpoint(tmp_path / family, family, num_hidden_layers=2)): schedules
        for family, schedules in families.items()
    }
    run_ranks(generate_under_watch, 2, paths)
