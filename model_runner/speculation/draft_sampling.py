"""How a draft is chosen from the draft network's logits: the most likely token, or one that is drawn.

Drawn drafts are for acceptance by rejection: a draft is right more often if it follows the distribution that it is
checked against, and the check must know which one it was drawn from. A greedy request's drafts are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.host_copy import to_device
from model_runner.request import Request

__all__ = ["DraftChoice"]


class DraftChoice:
    """Chooses the drafts of a chain, step by step.

    Args:
        requests: whose.
        num_steps: drafts of each.
        sampled: draw those of requests that are sampled, at their temperature.
        device: of the logits.
    """

    def __init__(self, requests: Sequence[Request], num_steps: int, *, sampled: bool, device: torch.device) -> None:
        self._drawn = [sampled and not request.params.greedy for request in requests]
        self._probabilities: list[Tensor] = []
        if not any(self._drawn):
            return
        pairs = list(zip(requests, self._drawn, strict=True))
        temperatures = torch.tensor([request.params.temperature if drawn else 1.0 for request, drawn in pairs])
        # The draw of a place does not depend on how many steps it took to get there.
        draws = [
            [request.draft_draw(request.num_output_tokens + step) if drawn else 0.0 for request, drawn in pairs]
            for step in range(num_steps)
        ]
        host = (temperatures[:, None], torch.tensor(draws, dtype=torch.float64)[:, :, None], torch.tensor(self._drawn))
        self._temperatures, self._draws, self._is_drawn = to_device(host, device)

    def choose(self, logits: Tensor) -> Tensor:
        """The next draft of every request, `[R]` int64, from `[R, vocab]`."""
        best = logits.argmax(dim=-1)
        if not any(self._drawn):
            return best
        probabilities = (logits.float() / self._temperatures).softmax(dim=-1)
        cumulative = probabilities.double().cumsum(dim=-1)
        total = cumulative[:, -1:]
        place = torch.searchsorted(cumulative, self._draws[len(self._probabilities)] * total, right=True)
        self._probabilities.append(probabilities)
        # A draw next to 1 may round up to the total: the last token that has any probability.
        drawn = torch.minimum(place, (cumulative < total).sum(dim=-1, keepdim=True)).squeeze(1)
        return torch.where(self._is_drawn, drawn, best)

    def distributions(self) -> list[Tensor | None]:
        """Of each request `[steps, vocab]` float32, what its drafts were drawn from; None where they were not."""
        if not self._probabilities:
            return [None] * len(self._drawn)
        each = torch.stack(self._probabilities, dim=1).unbind()
        return [own if drawn else None for own, drawn in zip(each, self._drawn, strict=True)]
