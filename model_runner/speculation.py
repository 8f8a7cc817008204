"""Speculative decoding with any proposer: the interface of proposers, and the acceptance of drafts.

Proposers guess a request's next tokens, so that one step of the model can check several.

    propose     drafts after the known tokens, as a chain or as a tree
    observe     the results of a target's step: hidden states of its rows, new tokens, accepted drafts
    forget      the request has ended, or lost its KV

Drafts never change a request's output, only the number of its steps (with acceptance by rejection, they do not change
the output's distribution). A proposer may be wrong, late, or make no drafts.

The simplest drafts are by prompt lookup: the tokens that followed an earlier occurrence of the last tokens.
`NgramProposer` looks for the longest run of last tokens, from `shortest` to `longest`, that occurs earlier in the
sequence; among several the most recent. The tokens after it are the draft. If these reach the end of the sequence, the
draft continues with its own tokens, so a repeating sequence is drafted to any length. An index per sequence maps each
run of `shortest` tokens to its occurrences, and is extended once per token; longer runs are found by comparing
backwards from these. Rescanning would read the whole context at every step.

Drafts are accepted in one of two ways, with the token after the last accepted one:

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

Draft networks are in `model_runner.drafting`; trees of drafts in `model_runner.step.batch`.

Source: prompt lookup decoding (Saxena, 2023); rejection: Leviathan and others, Chen and others (both 2023); trees:
SpecInfer (2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling.rows import SamplingRow
from model_runner.sampling.sampler import OUT_OF_TOKENS, distributions, fall
from model_runner.step.request import Request, ScheduledRequest
from model_runner.step.step import Step
from ubatch.streams import to_device


@dataclass(frozen=True)
class Draft:
    """Draft tokens after a request's last token.

    Attributes:
        tokens: `D` draft tokens; may be empty.
        parents: for each draft the node it follows: 0 is the last known token (the root), `j + 1` is draft `j`, an
            earlier one. None is a chain: every draft follows the previous one.
        probs: `[D, vocab]` float32, the distribution each draft was drawn from; None if they were not drawn. Chains
            only.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None


class Proposer(Protocol):
    """Makes drafts. The scheduler calls it between steps."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Drafts of each request.

        Args:
            requests: requests without pending tokens.
            counts: most drafts of each request; the proposer may make fewer.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was retracted: its keys and values are gone."""
        ...


class StepObserver(Protocol):
    """A proposer that needs the target's hidden states; see `ModelRunner.set_observer`."""

    def observe(
        self, step: Step, hidden: Tensor, tokens: Sequence[tuple[int, ...]], accepted_rows: Sequence[tuple[int, ...]]
    ) -> None:
        """Called once per step with tokens when its result is read, in the order of the steps.

        Args:
            step: the step.
            hidden: `[T, hidden_size]` of all its rows, normalised: the input of `compute_logits`.
            tokens: the new tokens of each share; none for a prompt chunk that does not end its prompt.
            accepted_rows: in a verify step, for each share the rows of its root and its accepted drafts, in order;
                else empty.
        """
        ...


class NgramProposer:
    """Drafts by prompt lookup, a chain for every request; it does not use the model. See `Proposer`.

    Args:
        shortest: tokens of the shortest run to look up, at least 1.
        longest: tokens of the longest run to look up.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[Request, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """For each request as many drafts as wanted, or none if no earlier run is found."""
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(self._shortest, self._longest)
            drafts.append(Draft(tuple(index.draft(request.token_ids, count))))
        return drafts

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended."""
        self._indices.pop(request, None)


class NgramIndex:
    """Index of the runs of one growing sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous = array("q")  # start of a run -> start of its previous occurrence, or -1

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Draft `count` tokens; none if no earlier run is found.

        Args:
            tokens: the sequence; between calls it may only grow.
            count: number of drafts.
        """
        if count < 1 or len(tokens) <= self._shortest:
            return []
        self._take_in(tokens)
        follows = self._find(tokens)
        if follows is None:
            return []
        draft = list(tokens[follows : follows + count])
        while len(draft) < count:
            draft.append(draft[len(draft) - (len(tokens) - follows)])
        return draft

    def _take_in(self, tokens: Sequence[int]) -> None:
        """Index the runs that end before the last token; the run that ends at it is the one to look up."""
        first, stop = len(self._previous), len(tokens) - self._shortest
        runs = zip(*(tokens[first + shift : stop + shift] for shift in range(self._shortest)), strict=True)
        for start, run in enumerate(runs, first):
            self._previous.append(self._latest.get(run, -1))
            self._latest[run] = start

    def _find(self, tokens: Sequence[int]) -> int | None:
        """The index after the best earlier occurrence of the last tokens."""
        begin = len(tokens) - self._shortest
        start = self._latest.get(tuple(tokens[begin:]), -1)
        best, best_extra, most = None, -1, self._longest - self._shortest
        while start >= 0:
            extra = 0  # tokens before the run that are equal too
            while extra < most and extra < start and tokens[start - 1 - extra] == tokens[begin - 1 - extra]:
                extra += 1
            if extra > best_extra:
                best, best_extra = start + self._shortest, extra
                if extra == most:
                    break
            start = self._previous[start]
        return best


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
