"""Acceptance of drafts, and the token after the last accepted one.

    match       every row is sampled as without drafts. From the root on, a child is accepted if it equals the token
                sampled at its parent's row. So the tokens are those of a run without drafts, also for sampled requests.
    rejection   a draft d, drawn from q where the target's distribution is p, is accepted with probability
                min(1, p(d) / q(d)). The first rejected draft is replaced by a token from max(p - q, 0), scaled to sum
                to 1; after the last draft, if all are accepted, a token is drawn from p. So the tokens have the same
                distribution as without drafts, and more drafts are accepted than by match.

Both give one token per row, and new tokens are read from the rows in the same way. Under rejection a row's token is its
draft if that is accepted, else the replacement; the two always differ, because max(p - q, 0) is 0 at a rejected draft.
p is the target's distribution after the request's temperature, top-k, top-p, min-p, penalties and masks. If q is not
known, it counts as 1 for the draft. Greedy requests always use match.

Source: Leviathan and others, Chen and others (both 2023); trees: SpecInfer (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling.rows import SamplingRow
from model_runner.sampling.sampler import OUT_OF_TOKENS, distributions, fall
from model_runner.step.request import ScheduledRequest
from ubatch.streams import to_device


class Acceptance(StrEnum):
    """When drafts of sampled requests are accepted."""

    MATCH = "match"
    REJECTION = "rejection"


def check_acceptance(shares: Sequence[ScheduledRequest], acceptance: Acceptance) -> None:
    """Check that these drafts fit the way of acceptance.

    Raises:
        RequestError: rejection is used with a tree of a sampled request; match is used with distributions of drafts; or
            distributions do not have one row per draft.
    """
    for share in shares:
        name, probs = share.request.request_id, share.draft_probs
        is_chain = share.parents in (None, tuple(range(len(share.drafts))))
        if acceptance is Acceptance.REJECTION and not is_chain and not share.request.params.greedy:
            raise RequestError(
                f"request {name!r} is sampled and its drafts are a tree; only chains are accepted by rejection. Draft "
                "a chain, or accept by match."
            )
        if probs is None:
            continue
        if acceptance is Acceptance.MATCH:
            raise RequestError(
                f"request {name!r} brings the distributions of its drafts, which are accepted by match; leave them "
                "out, or accept by rejection."
            )
        if probs.dim() != 2 or probs.shape[0] != len(share.drafts):
            raise RequestError(
                f"request {name!r} has {len(share.drafts)} drafts, and distributions of shape {list(probs.shape)}; "
                "there must be one row per draft."
            )


def accepted_nodes(drafts: Sequence[int], parents: Sequence[int] | None, says: Sequence[int]) -> tuple[int, ...]:
    """The nodes from the root to the last accepted draft; the tokens of their rows are the new tokens.

    Args:
        drafts: `D` draft tokens.
        parents: see `Draft.parents`.
        says: the tokens of the rows of the `D + 1` nodes.
    """
    path = [0]
    # Parents come before their children, so one pass finds the whole path.
    for draft, token in enumerate(drafts):
        parent = draft if parents is None else parents[draft]
        if parent == path[-1] and token == says[parent]:
            path.append(draft + 1)
    return tuple(path)


@dataclass(frozen=True)
class DraftRows:
    """A sampled request in a verify step; its drafts are a chain.

    Attributes:
        first: index of its root's row among the step's rows.
        rows: how the rows of root and drafts are sampled.
        draws: for each draft the uniform random number that accepts or rejects it.
    """

    share: ScheduledRequest
    first: int
    rows: Sequence[SamplingRow]
    draws: Sequence[float]

    @classmethod
    def of(cls, share: ScheduledRequest, first: int, rows: Mapping[int, SamplingRow], index: int) -> DraftRows:
        """The rows of a request whose next output token has this `index`; `rows` are those of the whole step."""
        nodes = range(len(share.drafts) + 1)
        draws = [share.request.accept_draw(index + draft) for draft in nodes[:-1]]
        return cls(share, first, [rows[first + node] for node in nodes], draws)


def sample_by_rejection(
    logits: Tensor, requests: Sequence[DraftRows], masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens of the rows of sampled requests, by rejection sampling.

    Args:
        logits: `[S, vocab]`, of all rows of the step.
        requests: at least one; all have equally many drafts.
        masks: of rows with a grammar, see `model_runner.sampling.rows.adjust_logits`.

    Returns:
        The indices of their rows, and a token for each, both `[len(requests) * (D + 1)]` int64; `OUT_OF_TOKENS` if the
        request's parameters allow none.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary, or a draft's distribution has another
            vocabulary.
    """
    count, num_drafts, vocab = len(requests), len(requests[0].share.drafts), logits.shape[-1]
    rows = [row for request in requests for row in request.rows]
    numbers = [request.first + node for request in requests for node in range(num_drafts + 1)]
    host = (
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor([request.share.drafts for request in requests], dtype=torch.int64)[..., None],
        torch.tensor([request.draws for request in requests], dtype=torch.float64)[..., None],
        torch.tensor([row.draw for row in rows], dtype=torch.float64)[:, None],
    )
    where, drafts, accepting, drawing = to_device(host, logits.device)
    p = distributions(logits.index_select(0, where), rows, masks).view(count, num_drafts + 1, vocab)
    q = torch.zeros_like(p)  # no draft follows the last one: q is 0 there, and the rest is p
    _fill_distributions(q[:, :-1], drafts, requests)

    accepted = accepting * q[:, :-1].gather(2, drafts) < p[:, :-1].gather(2, drafts)
    rest = (p - q).clamp_min_(0)
    # If q equals p, rounding may still reject a draft, and the rest is empty: draw from p then.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    says = fall(rest.flatten(0, 1), drawing).view(count, num_drafts + 1, 1)
    says[:, :-1] = torch.where(accepted, drafts, says[:, :-1])
    says.masked_fill_(p[..., :1].isnan(), OUT_OF_TOKENS)
    return where, says.flatten()


def _fill_distributions(q: Tensor, drafts: Tensor, requests: Sequence[DraftRows]) -> None:
    """Write the distribution of each draft into `q` `[R, D, vocab]`, which holds zeros."""
    for own, certain, request in zip(q, drafts, requests, strict=True):
        probs = request.share.draft_probs
        if probs is None:
            own.scatter_(1, certain, 1)
        elif probs.shape[1] != q.shape[-1]:
            raise RequestError(
                f"request {request.share.request.request_id!r} has drafts from a vocabulary of {probs.shape[1]} "
                f"tokens; the model's has {q.shape[-1]}. Draft with a model of the same tokenizer."
            )
        else:
            torch.div(probs.float(), probs.float().sum(dim=-1, keepdim=True), out=own)
