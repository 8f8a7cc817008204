"""Which drafts are right, and what comes after the last of them.

    match       every row is sampled as it would be without drafts. From the root on, a child is accepted if it is what
                the row of its parent says. So the tokens are those of a run without drafts, sampled ones, too.
    rejection   a draft d, drawn from q where the target says p, is accepted with probability min(1, p(d) / q(d)). The
                first one that is not is replaced by a token from max(p - q, 0), scaled to sum to 1; behind the last
                one comes a token from p. So the tokens are distributed as without drafts, and are accepted oftener.

Both give one token per row, and new tokens are read off the rows alike: under rejection a row says its draft, if that
is accepted, else the replacement, which is never that draft, because max(p - q, 0) is 0 there. p is what the request's
temperature, top-k, top-p, min-p, penalties and masks leave of the target's distribution. A draft whose q is not
known counts as certain. A greedy request always matches.

Source: Leviathan and others, Chen and others (both 2023); trees: SpecInfer (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling.penalties import SamplingRow
from model_runner.sampling.sampler import OUT_OF_TOKENS, distributions, fall
from model_runner.step.request import ScheduledRequest
from ubatch.streams.small_copies import to_device

__all__ = ["Acceptance", "DraftRows", "accepted_nodes", "check_acceptance", "sample_by_rejection"]


class Acceptance(StrEnum):
    """When drafts of sampled requests are accepted."""

    MATCH = "match"
    REJECTION = "rejection"


def check_acceptance(shares: Sequence[ScheduledRequest], acceptance: Acceptance) -> None:
    """Whether these drafts can be accepted like that.

    Raises:
        RequestError: a tree of a sampled request cannot be accepted by rejection; distributions of drafts are of no use
            for a match, or are not one row per draft.
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
    """The nodes from the root to the last accepted draft; what their rows say are the new tokens.

    Args:
        drafts: `D` of them.
        parents: see `Draft.parents`.
        says: what the rows of the `D + 1` nodes say.
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
    """A sampled request in a verify step.

    Attributes:
        share: its drafts, a chain.
        first: the row of its root among the step's rows.
        rows: how the rows of root and drafts are sampled.
        draws: of each draft the uniform number that accepts or rejects it.
    """

    share: ScheduledRequest
    first: int
    rows: Sequence[SamplingRow]
    draws: Sequence[float]

    @classmethod
    def of(cls, share: ScheduledRequest, first: int, rows: Mapping[int, SamplingRow], index: int) -> DraftRows:
        """Of a request whose next output token is number `index`, from the `rows` of the whole step."""
        nodes = range(len(share.drafts) + 1)
        draws = [share.request.accept_draw(index + draft) for draft in nodes[:-1]]
        return cls(share, first, [rows[first + node] for node in nodes], draws)


def sample_by_rejection(logits: Tensor, requests: Sequence[DraftRows]) -> tuple[Tensor, Tensor]:
    """What the rows of sampled requests say.

    Args:
        logits: `[S, vocab]`, of all rows of the step.
        requests: at least one; all have equally many drafts.

    Returns:
        The numbers of their rows, and a token for each, `[len(requests) * (D + 1)]` int64 both; `OUT_OF_TOKENS`
        where the request's parameters leave none.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary, or a draft's distribution is over another
            one.
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
    p = distributions(logits.index_select(0, where), rows).view(count, num_drafts + 1, vocab)
    q = torch.zeros_like(p)  # nothing was drafted behind the last draft: there the rest is p itself
    _fill_distributions(q[:, :-1], drafts, requests)

    accepted = accepting * q[:, :-1].gather(2, drafts) < p[:, :-1].gather(2, drafts)
    rest = (p - q).clamp_min_(0)
    # Where rounding alone rejects, nothing may be left: q is p there.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    says = fall(rest.flatten(0, 1), drawing).view(count, num_drafts + 1, 1)
    says[:, :-1] = torch.where(accepted, drafts, says[:, :-1])
    says.masked_fill_(p[..., :1].isnan(), OUT_OF_TOKENS)
    return where, says.flatten()


def _fill_distributions(q: Tensor, drafts: Tensor, requests: Sequence[DraftRows]) -> None:
    """What each draft was drawn from, into `q` `[R, D, vocab]` of zeros."""
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
