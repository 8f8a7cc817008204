"""The experts' load as a runner counts it: every routed token once, in every kind of step, and no padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from checkpoints import checkpoint_fixture, make_checkpoint
from runner_graph_cases import make_captured
from runner_graph_cases import make_checkpoint as make_tiny
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, generate
from moe import modular_kernel
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, UBatchConfig

LAYERS, TOP_K = 2, 2
PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [1, 2], [7, 8, 9]]
NUM_TOKENS = 6
LANES = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}

checkpoint = checkpoint_fixture(num_hidden_layers=LAYERS, mlp_only_layers=[], num_experts_per_tok=TOP_K)


@contextmanager
def routed() -> Iterator[list[Tensor]]:
    """The experts of all tokens that a layer gets, of all layers."""
    found: list[Tensor] = []
    count = modular_kernel.map_and_count

    def spy(topk_ids: Tensor, *rest: Any) -> Tensor:
        found.append(topk_ids.clone())
        return count(topk_ids, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modular_kernel, "map_and_count", spy)
        yield found


def counts_of(runner: ModelRunner) -> Tensor:
    return runner.copy_expert_loads().wait()


def expected_sums(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Of every kind of step and layer: the last layer of a prefill runs only for rows that are sampled."""
    tokens, decoded = sum(map(len, prompts)), (NUM_TOKENS - 1) * len(prompts)
    return [[tokens * TOP_K] * (LAYERS - 1) + [len(prompts) * TOP_K], [decoded * TOP_K] * LAYERS]


def run(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> Tensor:
    generate(runner, prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    return counts_of(runner)


@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "lanes"])
def test_every_routed_token_is_counted(checkpoint: Path, overlap: bool) -> None:
    dbo = UBatchConfig(enable_dbo=overlap, **LANES)
    with ModelRunner(checkpoint, num_kv_blocks=64, dbo=dbo, experts_backend="grouped") as runner:
        with routed() as ids:
            counts = run(runner)
        chosen = torch.cat([each.flatten() for each in ids])
        assert torch.equal(counts.sum((0, 1)), torch.bincount(chosen, minlength=runner.config.num_experts))
        assert counts.sum(-1).tolist() == expected_sums()
        assert bool(runner.statistics().engaged) is overlap
        assert torch.equal(run(runner), 2 * counts), "the counts only grow"
        runner.clear_expert_loads()
        assert not counts_of(runner).any()


@needs_c
def test_repeated_steps_are_counted(checkpoint: Path) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=64, experts_backend="native") as runner:
        first = run(runner)
        assert first.sum(-1).tolist() == expected_sums()
        assert torch.equal(run(runner), 2 * first)
        repeated: Any = runner.model._repeated
        assert repeated.repetitions > 0


@pytest.mark.long
def test_padding_of_captured_steps_is_not_counted(tmp_path: Path) -> None:
    """Sizes of graphs are 1, 2, 4 and 7; five requests run in the largest."""
    path, prompts = make_tiny(tmp_path), [[each, 7, 9] for each in range(1, 6)]
    with make_captured(path) as captured:
        captured.clear_expert_loads()
        counts = run(captured, prompts)
        assert captured.graphs is not None
        assert counts.sum(-1).tolist() == expected_sums(prompts)


def test_a_dense_model_has_no_loads(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), num_kv_blocks=64) as runner:
        assert runner.expert_loads is None
        with pytest.raises(ConfigError, match="no experts"):
            runner.copy_expert_loads()


def loads_of_a_rank(rank: int, world_size: int, path: str, tensor_parallel_size: int) -> tuple[Tensor, int]:
    group = CommGroup.from_process_group(timeout_s=20)
    options: dict[str, Any] = {"num_kv_blocks": 64, "tensor_parallel_size": tensor_parallel_size}
    with ModelRunner(path, group=group, dbo=UBatchConfig(**LANES), **options) as runner:
        prompts = PROMPTS if rank == 0 or tensor_parallel_size > 1 else []
        return run(runner, prompts), runner.statistics().engaged


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2], ids=["one rank is idle", "tensor parallel"])
def test_ranks_count_their_own_tokens(checkpoint: Path, size: int) -> None:
    found = run_ranks(loads_of_a_rank, 2, str(checkpoint), size)
    counts = [each for each, _ in found]
    assert sum(counts).sum(-1).tolist() == expected_sums()  # type: ignore[attr-defined]
    assert bool(counts[1].any()) is (size == 2)
