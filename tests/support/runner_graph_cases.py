"""Runners that replay graphs on a CPU, and a load that keeps them busy: requests that come and go.

Needs neither transformers nor a GPU, so the tests that need a GPU use it, too.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import static_attention
import torch
import torch.nn.functional as F
from fake_graphs import FakeGraphs
from request_steps import admitted, prefill
from torch import Tensor

from model_runner import ModelRunner, RandomQwen3Moe, Request, SamplingParams, ScheduledRequest, make_random_qwen3_moe
from moe import FusedExperts, register_experts_backend
from ubatch import UBatchConfig

EXPERTS = "static_dense"
MAX_NUM_SEQS = 9
SIZES = (1, 2, 4, 7)
TINY = RandomQwen3Moe(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    max_position_embeddings=128,
)


class StaticExperts(FusedExperts):
    """Experts that can be captured: every expert computes every token, and weights of 0 take most of it back.

    Attributes:
        visits: rows that some expert was meant to see, counted on the device.
    """

    capturable: ClassVar[bool] = True

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self.visits = torch.zeros((), dtype=torch.int64, device=w13.device)

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """See `Experts`."""
        self.visits.add_((topk_ids >= 0).any(-1).sum())
        gate, up = torch.einsum("nh,eih->eni", hidden_states, self.w13).chunk(2, dim=-1)
        rows = torch.einsum("eni,ehi->enh", F.silu(gate) * up, self.w2)
        experts = torch.arange(len(self.expert_range), device=topk_ids.device) + self.expert_range.start
        weights = (topk_weights[:, :, None] * (topk_ids[:, :, None] == experts)).sum(1)
        return torch.einsum("enh,ne->nh", rows, weights.to(rows.dtype))

    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        """See `BatchedExperts`."""
        gate, up = _product(hidden_states, self.w13).chunk(2, dim=-1)
        return _product(F.silu(gate) * up, self.w2)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, rounded once: processors without products of bfloat16 take ten times as long for those."""
    return (x.float() @ weight.mT.float()).to(x.dtype)


register_experts_backend(EXPERTS, "runner_graph_cases:StaticExperts")
static_attention.register()


def make_checkpoint(folder: Path, size: RandomQwen3Moe = TINY) -> Path:
    """A tiny Qwen3-MoE, the same every time."""
    return make_random_qwen3_moe(folder, 3, size=size, dtype=torch.float32)


def make_runner(checkpoint: Path, *, lanes: int = 0, threshold: int = 4, **options: Any) -> ModelRunner:
    """A runner with capturable back ends; `lanes` 0 never overlaps."""
    dbo = UBatchConfig(
        enable_dbo=lanes > 0,
        num_ubatches=max(2, lanes),
        dbo_decode_token_threshold=max(threshold, lanes, 2),
        dbo_prefill_token_threshold=max(threshold, lanes, 2),
    )
    settings: dict[str, Any] = {
        "experts_backend": EXPERTS,
        "attention_backend": static_attention.NAME,
        "num_kv_blocks": 400,
        "block_size": 4,
        "max_num_seqs": MAX_NUM_SEQS,
        "dbo": dbo,
    }
    return ModelRunner(checkpoint, **(settings | options))


def make_captured(checkpoint: Path, **options: Any) -> ModelRunner:
    """A runner that has captured `SIZES`; on a CPU through the fake graphs."""
    settings: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": SIZES, "graphs": FakeGraphs()}
    runner = make_runner(checkpoint, **(settings | options))
    runner.capture_graphs()
    return runner


def start(runner: ModelRunner, lengths: Sequence[int], room: int = 20) -> list[Request]:
    """Requests that have prefilled, and decode next."""
    requests = admitted(runner, [[(n + i) % 50 for i in range(length)] for n, length in enumerate(lengths)], room)
    prefill(runner, requests)
    return requests


@dataclass(frozen=True)
class Job:
    """A request of a load: when it comes, and what it wants."""

    arrives: int
    prompt: list[int]
    params: SamplingParams


def make_load(count: int, steps: int, longest: int, seed: int = 0, vocabulary: int = TINY.vocab_size) -> list[Job]:
    """So many requests over so many steps; some greedy, some sampled with a seed of their own."""
    rng = random.Random(seed)
    jobs = []
    for number in range(count):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 9))]
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {}
        params = SamplingParams(max_tokens=rng.randint(2, longest), ignore_eos=True, **sampled)
        jobs.append(Job(rng.randrange(steps), prompt, params))
    return jobs


def serve(runner: ModelRunner, jobs: Sequence[Job]) -> tuple[list[list[int]], list[int]]:
    """Run a load: new requests prefill in a step of their own, then all decode.

    Returns:
        The output of every job, and how many requests each decode step had.
    """
    outputs: list[list[int]] = [[] for _ in jobs]
    waiting = sorted(range(len(jobs)), key=lambda number: (jobs[number].arrives, number))
    running: list[Request] = []
    sizes = []
    step = 0
    while waiting or running:
        new = [n for n in waiting if jobs[n].arrives <= step][: MAX_NUM_SEQS - len(running)]
        step += 1
        if not new and not running:
            continue
        if new:
            waiting = [number for number in waiting if number not in new]
            batch = [Request(number, jobs[number].prompt, jobs[number].params) for number in new]
            for request in batch:
                runner.admit(request, request.num_tokens + request.params.max_tokens)
            running += batch
        else:
            batch = list(running)
            sizes.append(len(batch))
        shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in batch]
        tokens = runner.execute(shares).tokens
        for share, (token,) in zip(shares, tokens, strict=True):
            request = share.request
            request.advance(share.num_tokens, token)
            outputs[int(request.request_id)].append(token)
            if request.num_output_tokens == request.params.max_tokens:
                running.remove(request)
                runner.release(request)
    runner.allocator.check(idle=True)
    return outputs, sizes
