"""Two gloo ranks for the families other than Qwen3-MoE: transformers' tokens and logits, overlapped and not.

DP 2 + EP 2; DP 2 alone where there are no experts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, generate
from ranks import run_ranks
from ubatch import CommGroup, UBatchConfig

pytestmark = pytest.mark.ranks

DENSE = ("Qwen2", "Qwen3", "Mistral", "Llama", "Granite")
FAMILIES = [
    ("DeepseekV3", "Mixtral", "Llama", "GraniteMoe"),
    pytest.param(("DeepseekV2", "Qwen3"), marks=pytest.mark.slow),
    pytest.param(("Qwen2Moe", "Olmoe", "GptOss", "Glm4Moe", "MiMoV2Flash"), marks=pytest.mark.slow),
    pytest.param(("Qwen2", "Mistral", "Granite", "GraniteMoeShared"), marks=pytest.mark.slow),
]
NUM_TOKENS = 8
EAGER = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
ARMS: dict[str, dict[str, Any]] = {
    "off": {"dbo": UBatchConfig(enable_dbo=False)},
    "two lanes": {"dbo": UBatchConfig(**EAGER)},
    "five stages": {"dbo": UBatchConfig(**EAGER, schedule="two_batch_decode")},
}


def prompts_of(rank: int) -> list[list[int]]:
    """Rank 0 has four prompts, rank 1 two shorter ones."""
    rng = random.Random(rank)
    return [[rng.randrange(131) for _ in range(length)] for length in ((5, 30, 2, 9) if rank == 0 else (4, 7))]


def generate_in_all_arms(rank: int, world_size: int, paths: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    group = CommGroup.from_process_group(timeout_s=20)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for family, path in paths.items():
        for name, arm in ARMS.items():
            with ModelRunner(path, group=group, num_kv_blocks=64, block_size=4, **arm) as runner:
                logits: list[Tensor] = []
                compute = runner.model.compute_logits

                def record(hidden: Tensor, compute: Any = compute, logits: list[Tensor] = logits) -> Tensor:
                    logits.append(compute(hidden))
                    return logits[-1]

                runner.model.compute_logits = record  # type: ignore[method-assign]
                outputs = generate(runner, prompts_of(rank), SamplingParams(max_tokens=NUM_TOKENS))
                kernels = [layer.mlp.kernel for layer in runner.model.layers if hasattr(layer.mlp, "kernel")]
                results[family, name] = {
                    "tokens": [output.token_ids for output in outputs],
                    "logits": [step.numpy() for step in logits],
                    "engaged": runner.statistics().engaged,
                    "held": {tuple(kernel.experts.expert_range) for kernel in kernels},
                }
    return results


@pytest.mark.parametrize("families", FAMILIES, ids=" ".join)
def test_overlapped_and_not_equal_transformers(families: tuple[str, ...], tmp_path: Path) -> None:
    paths = {family: make_checkpoint(tmp_path / family, family, num_hidden_layers=2) for family in families}
    references = {family: load_reference(path) for family, path in paths.items()}
    ranks = run_ranks(generate_in_all_arms, 2, {family: str(path) for family, path in paths.items()})
    for rank, results in enumerate(ranks):
        for family, reference in references.items():
            expected = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts_of(rank)]
            for name in ARMS:
                arm = results[family, name]
                assert [list(tokens) for tokens in arm["tokens"]] == [tokens for tokens, _ in expected], (family, name)
                for step, logits in enumerate(arm["logits"]):
                    wanted = torch.stack([steps[step] for _, steps in expected])
                    assert (torch.from_numpy(logits) - wanted).abs().max() < 1e-4, (family, name, rank, step)
                assert len(arm["logits"]) == NUM_TOKENS
                assert arm["engaged"] == (0 if name == "off" else NUM_TOKENS), (family, name)
                experts = {tuple(range(4 * rank, 4 * rank + 4))}
                assert arm["held"] == (set() if family in DENSE else experts)
