"""Batches and chains of drafts: each draft is chosen from the draft network's logits, and run to get the next logits.

A draft is the most likely token, or drawn at random for rejection sampling: a drawn draft is accepted more often, and
the check needs the distribution it was drawn from. A greedy request's drafts are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model_runner.drafting.network import DraftNetwork
from model_runner.sampling.sampler import fall
from model_runner.step.request import Request
from ubatch import ForwardContext, set_forward_context
from ubatch.streams import to_device


@dataclass(frozen=True)
class DraftBatch:
    """The requests to draft for.

    Attributes:
        requests: in order; every one has a row.
        starts: position of each request's first draft.
        starts_device: the same, `[R]` int64 on the device.
        rows: rows of the request table, `[R]` int64 on the host.
        block_table: `[R, pages]` int32 on the device.
    """

    requests: tuple[Request, ...]
    starts: tuple[int, ...]
    starts_device: Tensor
    rows: Tensor
    block_table: Tensor


class DraftDraws(NamedTuple):
    """Inputs for drawing the drafts of a chain.

    Attributes:
        temperatures: `[R, 1]` float32; 1 for requests whose drafts are not drawn.
        draws: random numbers from 0 to 1, `[R, steps]` float64.
        is_drawn: whether a request's drafts are drawn, `[R]` bool.
    """

    temperatures: Tensor
    draws: Tensor
    is_drawn: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], num_steps: int, device: torch.device) -> DraftDraws:
        """Draws for these requests: drafts of sampled requests are drawn, at their temperature."""
        drawn = [not request.params.greedy for request in requests]
        pairs = list(zip(requests, drawn, strict=True))
        temperatures = torch.tensor([request.params.temperature if own else 1.0 for request, own in pairs])
        # The draw of a position does not depend on the number of steps before it.
        draws = [
            [request.draft_draw(request.num_output_tokens + step) if own else 0.0 for step in range(num_steps)]
            for request, own in pairs
        ]
        host = (temperatures[:, None], torch.tensor(draws, dtype=torch.float64), torch.tensor(drawn))
        return cls(*to_device(host, device))


def choose_drafts(logits: Tensor, draws: DraftDraws | None, step: int) -> tuple[Tensor, Tensor | None]:
    """The next draft of every request, and the probabilities it was drawn from.

    Args:
        logits: `[R, vocab]`.
        draws: None if nothing is drawn.
        step: index of the draw to use.

    Returns:
        Drafts `[R]` int64, and probabilities `[R, vocab]` float32 or None.
    """
    best = logits.argmax(dim=-1)
    if draws is None:
        return best, None
    probabilities = (logits.float() / draws.temperatures).softmax(dim=-1)
    drawn = fall(probabilities, draws.draws[:, step, None]).squeeze(1)
    return torch.where(draws.is_drawn, drawn, best), probabilities


def draft_chain(
    network: DraftNetwork,
    context: ForwardContext,
    plans: Sequence[Any],
    positions: Tensor,
    hidden: Tensor,
    draws: DraftDraws | None,
) -> tuple[Tensor, Tensor | None]:
    """Draft a chain of `len(plans) + 1` tokens for every request.

    Args:
        context: forward context of every step, without its plan.
        plans: attention plans, one per draft that is run: all but the last.
        positions: `[R]` int64, positions of the first drafts.
        hidden: `[R, hidden_size]`, input of the first drafts' logits.
        draws: as for `choose_drafts`.

    Returns:
        Drafts `[R, drafts]` int64, and the probabilities they were drawn from, `[R, drafts, vocab]` float32, or None.
    """
    chosen, sources = [], []
    for step in range(len(plans) + 1):
        drafts, source = choose_drafts(network.compute_logits(hidden), draws, step)
        chosen.append(drafts)
        if source is not None:
            sources.append(source)
        if step < len(plans):
            with set_forward_context(replace(context, attn_metadata=plans[step])):
                hidden = network(drafts, positions + step, hidden)
    return torch.stack(chosen, dim=1), torch.stack(sources, dim=1) if sources else None
