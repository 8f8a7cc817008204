"""Prefills run the last layer's MLP only for rows whose output is read; all logits stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy, reference_logits
from model_checks import close
from request_steps import admitted

from model_runner import ModelRunner, PendingStep, SamplingParams, ScheduledRequest, generate
from ranks import run_ranks
from ubatch import CommGroup, UBatchConfig

PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [1], list(range(20, 61)), [130, 0, 64]]
CHUNK = 10
"""Tokens of the longest prompt that run in the first step, which samples nothing of it."""
LANES = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2, "require_overlap": True}
FAMILIES = ("Qwen3Moe", "Llama", "DeepseekV3", "Qwen3Next")


@contextmanager
def counting_rows(runner: ModelRunner) -> Iterator[list[int]]:
    """The rows that each layer's MLP has got."""
    counts = [0] * len(runner.model.layers)  # type: ignore[arg-type]
    hooks = []
    for number, layer in enumerate(runner.model.layers):  # type: ignore[arg-type]

        def count(module: Any, args: tuple[Any, ...], number: int = number) -> None:
            counts[number] += len(args[0])

        hooks.append(layer.mlp.register_forward_pre_hook(count))
    yield counts
    for hook in hooks:
        hook.remove()


def first_step(runner: ModelRunner, **params: Any) -> tuple[list[int], PendingStep]:
    """Every layer's rows in a step of all prompts, of the longest a chunk only; and the step."""
    requests = admitted(runner, PROMPTS, 20, **params)
    lengths = [CHUNK if request.num_tokens == 41 else request.num_tokens for request in requests]
    with counting_rows(runner) as counts:
        step = runner.launch(list(map(ScheduledRequest, requests, lengths)))
    return counts, step


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [False, True], ids=["unsplit", "lanes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_last_mlp_runs_for_sampled_rows(tmp_path: Path, family: str, lanes: bool) -> None:
    path = make_checkpoint(tmp_path, family)
    dbo = UBatchConfig(**LANES) if lanes else UBatchConfig(enable_dbo=False)
    with ModelRunner(path, num_kv_blocks=64, block_size=4, dbo=dbo) as runner:
        (*before, last), step = first_step(runner)
        assert (set(before), last) == ({7 + 1 + CHUNK + 3}, 3)
        assert step.step.decision.engaged is lanes
        reference, logits = load_reference(path), step._logits
        assert logits is not None
        close(logits, torch.stack([reference_logits(reference, PROMPTS[index])[-1] for index in (0, 1, 3)]))


@pytest.mark.long
def test_all_rows_run_if_they_are_read(tmp_path: Path) -> None:
    """For prompts' log-probabilities, for an observer, and in a step that samples every row."""

    class Observer:
        def observe(self, batch: Any, hidden: Any, tokens: Any, accepted_rows: Any) -> None: ...

    path = make_checkpoint(tmp_path, "Qwen3Moe")
    with ModelRunner(path, num_kv_blocks=64, block_size=4) as runner:
        counts, _ = first_step(runner, prompt_logprobs=1)
        assert set(counts) == {7 + 1 + CHUNK + 3}
    with ModelRunner(path, num_kv_blocks=64, block_size=4) as runner:
        runner.set_observer(Observer())
        counts, _ = first_step(runner)
        assert set(counts) == {7 + 1 + CHUNK + 3}
    with ModelRunner(path, num_kv_blocks=64, block_size=4) as runner, counting_rows(runner) as counts:
        outputs = generate(runner, [[7], [9]], SamplingParams(max_tokens=4))
        assert counts == [8] * len(counts)
    assert [list(each.token_ids) for each in outputs] == [
        reference_greedy(load_reference(path), prompt, 4)[0] for prompt in ([7], [9])
    ]


def step_of_rank(rank: int, world_size: int, path: str, size: int, transport: str) -> Any:
    group = CommGroup.from_process_group(timeout_s=20)
    settings: dict[str, Any] = {"group": group, "tensor_parallel_size": size, "all2all_backend": transport}
    with ModelRunner(path, num_kv_blocks=64, block_size=4, dbo=UBatchConfig(**LANES), **settings) as runner:
        counts, step = first_step(runner)
        assert step.step.decision.engaged
        assert step._logits is not None
        return counts, step._logits.numpy()


@pytest.mark.wide
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "transport", "rows"),
    [(1, "torch_dist", [3, 3]), (2, "torch_dist", [0, 3]), (1, "allgather_reducescatter", [21, 21])],
    ids=["DP", "TP", "all rows are sent"],
)
def test_ranks(tmp_path: Path, size: int, transport: str, rows: list[int]) -> None:
    path = make_checkpoint(tmp_path, "Qwen3Moe")
    reference = load_reference(path)
    expected = torch.stack([reference_logits(reference, PROMPTS[index])[-1] for index in (0, 1, 3)])
    seen = run_ranks(step_of_rank, 2, str(path), size, transport)
    for (counts, logits), last in zip(seen, rows, strict=True):
        assert counts[-1] == last
        assert counts[0] >= 21 // size
        close(torch.from_numpy(logits), expected)
