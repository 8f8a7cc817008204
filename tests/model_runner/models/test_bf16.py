"""bfloat16 on a CPU: as near to float32 as transformers in bfloat16, and a row's result is its own.

Logits in bfloat16 of this project and of transformers are compared with transformers in float32: the error of each row.
A token that bfloat16 sends to another expert than float32 is far off, here as there, and a few such tokens are most of
a pooled error. So pooled errors are compared where every expert is visited, and medians where experts are chosen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from checkpoints import load_reference, make_checkpoint
from model_checks import admitted, all_logits
from torch import Tensor

from model_runner import ModelRunner, ScheduledRequest
from ubatch import UBatchConfig


@dataclass(frozen=True)
class Errors:
    """Root-mean-square errors of every row of logits: this project's in one step and in decode steps, transformers'."""

    prefill: Tensor
    decode: Tensor
    transformers: Tensor

    def pooled(self) -> tuple[float, float, float]:
        """Over all rows."""
        return _pooled(self.prefill), _pooled(self.decode), _pooled(self.transformers)

    def medians(self) -> tuple[float, float, float]:
        """Of the rows: not moved by the few that bfloat16 sends to another expert, which are far off."""
        return float(self.prefill.median()), float(self.decode.median()), float(self.transformers.median())


def bf16_errors(
    folder: Path, family: str, *, seeds: int, prompts: int = 16, length: int = 24, **overrides: Any
) -> Errors:
    """The errors over several random checkpoints in bfloat16, each with prompts of its own.

    Args:
        overrides: of the checkpoint's config.
    """
    found: list[tuple[Tensor, ...]] = []
    for seed in range(seeds):
        path = make_checkpoint(folder / f"{family}-{seed}", family, seed=seed, dtype=torch.bfloat16, **overrides)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 131, (prompts, length), generator=generator)
        exact = _transformers(path, tokens, torch.float32)
        got = (_whole(path, tokens), _forced(path, tokens), _transformers(path, tokens, torch.bfloat16))
        found.append(tuple((each.float() - exact).square().mean(dim=-1).sqrt().flatten() for each in got))
    return Errors(*(torch.cat(rows) for rows in zip(*found, strict=True)))


def teacher_forced(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    forced: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    threads: int,
) -> Tensor:
    """Logits of decode steps, `[steps, requests, vocab]`, after prefills of one request each on one thread.

    Args:
        forced: for each prompt the tokens to go on with, as many as there are steps.
        groups: the requests, by index, of each step; together they have every request once.
        threads: torch's, in the decode steps; they stay set.
    """
    torch.set_num_threads(1)
    requests = admitted(runner, [list(prompt) for prompt in prompts], 80)
    for request, tokens in zip(requests, forced, strict=True):
        all_logits(runner, [ScheduledRequest(request, request.num_tokens)])
        request.advance(request.num_tokens, tokens[0])
    torch.set_num_threads(threads)
    steps = []
    for step in range(1, len(forced[0]) + 1):
        rows: dict[int, Tensor] = {}
        for group in groups:
            shares = [ScheduledRequest(requests[index], 1) for index in group]
            rows.update(zip(group, all_logits(runner, shares), strict=True))
        steps.append(torch.stack([rows[index] for index in range(len(requests))]))
        for request, tokens in zip(requests, forced, strict=True):
            request.advance(1, tokens[min(step, len(tokens) - 1)])
    return torch.stack(steps)


def _pooled(errors: Tensor) -> float:
    return math.sqrt(float(errors.square().mean()))


@torch.no_grad()
def _transformers(path: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    model: Any = load_reference(path, dtype)
    logits: Tensor = model(tokens).logits
    return logits


def _runner(path: Path) -> ModelRunner:
    return ModelRunner(path, num_kv_blocks=512, block_size=8, dtype=torch.bfloat16)


def _whole(path: Path, tokens: Tensor) -> Tensor:
    with _runner(path) as runner:
        requests = admitted(runner, tokens.tolist(), 40)
        logits = all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests])
        return logits.view(*tokens.shape, -1)


def _forced(path: Path, tokens: Tensor) -> Tensor:
    """All requests together, a token in a step."""
    with _runner(path) as runner:
        requests = admitted(runner, tokens[:, :1].tolist(), 40)
        steps = []
        for at in range(1, tokens.shape[1] + 1):
            steps.append(all_logits(runner, [ScheduledRequest(request, 1) for request in requests]))
            for request, row in zip(requests, tokens.tolist(), strict=True):
                request.advance(1, row[at % len(row)])
        return torch.stack(steps, dim=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Qwen3Moe", {"num_experts_per_tok": 8}),
        ("Mixtral", {"num_experts_per_tok": 8}),
        ("DeepseekV3", {"num_experts_per_tok": 8, "topk_group": 4}),
        ("Llama", {}),
        ("Qwen3", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["Qwen3Moe", "Mixtral", "DeepseekV3", "Llama", "Qwen3", "Llama with biases"],
)
def test_logits_are_as_near_to_float32_as_those_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Of prompts in one step, and of decode steps."""
    prefill, decode, transformers = bf16_errors(tmp_path, family, seeds=2, **overrides).pooled()
    assert 0 < prefill <= transformers >= decode > 0


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_so_are_they_where_experts_are_chosen(family: str, tmp_path: Path) -> None:
    prefill, decode, transformers = bf16_errors(tmp_path, family, seeds=2).medians()
    assert 0 < prefill <= transformers >= decode > 0


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_no_more_tokens_are_far_off(family: str, tmp_path: Path) -> None:
    """Pooled over thousands of rows, within twice the standard error of the difference."""
    length = 32
    errors = bf16_errors(tmp_path, family, seeds=6, prompts=64, length=length)
    for ours in (errors.prefill, errors.decode):
        more = (ours.square() - errors.transformers.square()).view(-1, length).mean(dim=1)  # of a prompt
        assert float(more.mean()) <= 2 * float(more.std()) / math.sqrt(more.numel())


# -- a row's result is its own -------------------------------------------------------------------------------------

_LENGTHS = (9, 24, 3, 17, 40, 5, 12, 30)
_STEPS = 4
_TOGETHER = (tuple(range(8)),)
WAYS: dict[str, tuple[Sequence[Sequence[int]], int, bool]] = {
    "alone": (tuple((index,) for index in range(8)), 1, False),
    "in other batches": (((7, 0), (3, 1, 2), (6, 5, 4)), 1, False),
    "on two threads": (_TOGETHER, 2, False),
    "in two lanes": (_TOGETHER, 1, True),
    "in two lanes on two threads": (_TOGETHER, 2, True),
}
"""Groups of requests that share a step, threads, and whether the step is overlapped."""
WIDE = {"hidden_size": 512, "vocab_size": 4096, "intermediate_size": 384, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def decoded(
    path: Path, groups: Sequence[Sequence[int]], threads: int, overlap: bool, attention: str = "auto"
) -> Tensor:
    """Logits of decode steps; prompts are read alone and on one thread, so that all ways begin with the same cache."""
    generator = torch.Generator().manual_seed(1)
    prompts, forced = (
        [torch.randint(0, 131, (length,), generator=generator).tolist() for length in lengths]
        for lengths in (_LENGTHS, [_STEPS] * 8)
    )
    dbo = UBatchConfig(enable_dbo=overlap, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=1000)
    options = {"num_kv_blocks": 256, "block_size": 8, "attention_backend": attention}
    with ModelRunner(path, dtype=torch.bfloat16, dbo=dbo, **options) as runner:
        logits = teacher_forced(runner, prompts, forced, groups, threads)
        assert runner.statistics().engaged == (_STEPS if overlap else 0)
    return logits


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.sample(2)
@needs_c
@pytest.mark.parametrize("overrides", [{}, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3", "Llama"])
def test_decode_steps_are_the_same_to_the_last_bit(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Whoever shares the batch, on any number of threads, in lanes or not: attention and products are ours."""
    path = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **overrides)
    expected = decoded(path, _TOGETHER, 1, overlap=False)
    for name, (groups, threads, overlap) in WAYS.items():
        assert torch.equal(decoded(path, groups, threads, overlap), expected), name


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_with_a_librarys_products_they_are_the_same_within_rounding(
    way: tuple[Sequence[Sequence[int]], int, bool], tmp_path: Path
) -> None:
    """Those of latent attention are torch's here. A token may go to another expert, so the median row decides."""
    path = make_checkpoint(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    expected = decoded(path, _TOGETHER, 1, overlap=False, attention="torch").float()
    difference = (decoded(path, *way, attention="torch").float() - expected).square().mean(dim=-1).sqrt()
    assert float(difference.median()) <= 2**-9 * float(expected.abs().max())
