"""A proposer that knows the right continuation, and is wrong as often as it is told."""

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from attention import RequestToTokenTable
from model_runner import PENDING_TOKEN, Draft, Request

NextTokens = Callable[[Request, Sequence[int]], int]
"""From a request and all its tokens, drafts of a path included, to the next one."""


@dataclass(eq=False)
class FakeProposer:
    """Implements `Proposer`.

    Attributes:
        next_token: what is right.
        right: probability that a draft is.
        trees: every second draft is a tree, whose nodes follow any node before; else all are chains.
        silent: probability that a request gets no draft at all.
        places: behind the last token that it writes while it drafts, whatever it proposes.
        vocab_size: wrong tokens are below it.
        known: requests that it was asked about and has not forgotten.
        table: where it looks whether there are blocks, if it is set.
    """

    next_token: NextTokens
    _: KW_ONLY
    right: float = 0.7
    trees: bool = False
    silent: float = 0.0
    places: int = 0
    vocab_size: int = 50
    seed: int = 0
    known: set[Request] = field(default_factory=set)
    table: RequestToTokenTable | None = None
    asked: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        assert len(requests) == len(counts) > 0
        self.asked += 1
        return [self._draft(request, count) for request, count in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self.known.discard(request)

    def _draft(self, request: Request, count: int) -> Draft:
        assert count >= 1
        assert PENDING_TOKEN not in request.token_ids
        assert request.num_uncomputed_tokens == 1
        if self.table is not None:
            assert request.row is not None
            room = len(self.table.blocks(request.row)) * self.table.block_size
            assert room >= request.num_tokens + max(count, self.places), "no slots for its drafts"
        self.known.add(request)
        if self._rng.random() < self.silent:
            return Draft(())
        is_tree = self.trees and self._rng.random() < 0.5
        paths: list[list[int]] = [[]]
        parents: list[int] = []
        for index in range(self._rng.randint(1, count)):
            parents.append(self._rng.randint(0, index) if is_tree else index)
            path = paths[parents[-1]]
            right = self._rng.random() < self.right
            token = (
                self.next_token(request, [*request.token_ids, *path]) if right else self._rng.randrange(self.vocab_size)
            )
            paths.append([*path, token])
        return Draft(tuple(path[-1] for path in paths[1:]), tuple(parents) if is_tree else None)


def oracle(wanted: Sequence[Sequence[int]], vocab_size: int, **how: Any) -> FakeProposer:
    """One that knows the outputs; a request's id is its number among them."""

    def next_token(request: Request, tokens: Sequence[int]) -> int:
        known = wanted[int(request.request_id)]
        place = len(tokens) - request.num_prompt_tokens
        return known[place] if place < len(known) else 0

    return FakeProposer(next_token, vocab_size=vocab_size, **how)
