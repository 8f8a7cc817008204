"""What tests of models share: steps of a `ModelRunner` against transformers on the same checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from checkpoints import load_reference, reference_logits
from torch import Tensor

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, build_input_batch
from model_runner.models import DecoderConfig
from ubatch import Point, Schedule, UBatchConfig, interleave, tracing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [1], list(range(20, 61)), [130, 0, 64]]
TOLERANCE = 1e-4
DECODE_STEPS = 32


def all_logits(runner: ModelRunner, scheduled: list[ScheduledRequest]) -> Tensor:
    """The logits of every token of one step, `[T, vocab]`."""
    with torch.inference_mode():
        batch = build_input_batch(scheduled, runner.request_table, runner.kv_cache.spec, runner.device)
        step = runner.agree(batch)
        runner._follow_states(step)
        return runner.forward(replace(step, logits_rows=torch.arange(step.num_tokens, device=runner.device)))


def admitted(runner: ModelRunner, prompts: list[list[int]], num_tokens: int = 64) -> list[Request]:
    """Requests with rows and blocks for `num_tokens` tokens each."""
    requests = [Request(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
    for request in requests:
        runner.admit(request, num_tokens)
    return requests


def close(got: Tensor, expected: Tensor) -> None:
    """Logits within `TOLERANCE` of transformers'."""
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.abs().max() > 0.5  # large enough for the tolerance to mean something


def prompt_logits(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> Tensor:
    """The logits of every token of all prompts, in one step."""
    requests = admitted(runner, prompts)
    return all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests]).cpu()


def prefill_logits(path: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> Tensor:
    """The same, of a runner for it alone."""
    with ModelRunner(path, num_kv_blocks=64, block_size=4, **settings) as runner:
        return prompt_logits(runner, prompts)


def expected_logits(reference: Path | PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> Tensor:
    """The same by transformers."""
    model = load_reference(reference) if isinstance(reference, Path) else reference
    return torch.cat([reference_logits(model, prompt) for prompt in prompts])


def check_prefill(path: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> None:
    """One step of all prompts: the logits of every token."""
    close(prefill_logits(path, prompts, **settings), expected_logits(path, prompts))


def check_decode(path: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> int:
    """A prefill and `DECODE_STEPS` decode steps: every step's logits, and the tokens where they are not a near tie.

    transformers reads what was generated here in one go, so that one near tie does not end the comparison. Returns how
    many steps overlapped.
    """
    steps: list[Tensor] = []
    with ModelRunner(path, num_kv_blocks=128, block_size=8, **settings) as runner:
        requests = admitted(runner, prompts, 80)
        for _ in range(DECODE_STEPS + 1):
            shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in requests]
            logits = all_logits(runner, shares)
            steps.append(logits[torch.tensor([share.num_tokens for share in shares]).cumsum(0) - 1])
            for request, share, token in zip(requests, shares, steps[-1].argmax(-1).tolist(), strict=True):
                request.advance(share.num_tokens, token)
        engaged = runner.statistics().engaged
    reference = load_reference(path)
    decided = 0
    for request, got in zip(requests, torch.stack(steps, dim=1), strict=True):
        wanted = reference_logits(reference, request.token_ids[:-1])[request.num_prompt_tokens - 1 :]
        close(got, wanted)
        first, second = wanted.topk(2).values.unbind(-1)
        clear = first - second > 2 * TOLERANCE
        assert torch.equal(got.argmax(-1)[clear], wanted.argmax(-1)[clear])
        decided += int(clear.sum())
    assert decided >= 0.9 * len(prompts) * (DECODE_STEPS + 1)
    return engaged


def check_overlap(path: Path, schedule: str | Schedule) -> None:
    """`check_decode` with every step in two lanes, and the lanes' order as it must be."""
    dbo = UBatchConfig(
        schedule=schedule, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2, require_overlap=True
    )
    with tracing() as trace:
        assert check_decode(path, dbo=dbo) == DECODE_STEPS + 1
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.config, DecoderConfig)
        points = layer_points(runner.config, dbo.resolved_schedule())
    assert points
    order = interleave([points] * 2, lead=dbo.resolved_schedule().lead)
    assert trace.order == order * (DECODE_STEPS + 1)


def layer_points(config: DecoderConfig, schedule: Schedule) -> list[str]:
    """The points at which a lane hands on in one step."""
    passed: list[str] = []
    for layer in range(config.num_layers):
        passed.append(Point.ATTN_PREPARE)
        if config.moe is not None and layer in config.moe.layers:
            passed += [Point.SELECT, Point.DISPATCH, Point.COMBINE, Point.OUTPUT]
        passed.append(Point.LAYER)
    return [point for point in passed if schedule.active(point)]
