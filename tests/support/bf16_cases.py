"""Logits in bfloat16 of this project and of transformers, against transformers in float32: the error of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_reference, make_checkpoint
from model_checks import admitted, all_logits
from torch import Tensor

from model_runner import ModelRunner, ScheduledRequest

__all__ = ["Errors", "bf16_errors", "teacher_forced"]


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
