"""Tokens that were sampled on the device and are not known on the host yet.

The overlap loop launches step N + 1 before it reads the tokens of step N. A request's last token is then
`PENDING_TOKEN`, and the real one is looked up here, on the device, in stream order:

    step N, sample        store: tokens[row + 1] = the sampled token
    step N + 1, build     input id -(row + 1) for a pending token
    step N + 1, launch    resolve: ids below 0 are looked up

A request keeps its place while it has its row of the request table. Place 0 is for padding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.errors import StepOrderError
from model_runner.step.request import Request


class FutureMap:
    """The last sampled token of every row of the request table.

    On a GPU with Triton a store and a resolve are one launch each; elsewhere the references below run.

    Args:
        max_num_seqs: rows of the request table.
        device: device of the tokens.
    """

    def __init__(self, max_num_seqs: int, device: torch.device | str = "cpu") -> None:
        self._tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        # Each token's request, and its index in the request: a stale token must never be used for a new one.
        self._owners: list[tuple[Request, int] | None] = [None] * max_num_seqs
        self._resolve, self._store = resolve_reference, store_reference
        if self._tokens.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from model_runner.kernels.tokens import resolve_tokens, store_tokens

            self._resolve, self._store = resolve_tokens, store_tokens
            padding = self._tokens[:1]  # compiled now, not in the first steps
            self._store(self._tokens, padding, self._resolve(padding, self._tokens))

    def store(self, places: Tensor, tokens: Tensor, owners: Sequence[tuple[Request, int, int]]) -> None:
        """Store the sampled tokens of a step.

        Args:
            places: `[S]` int64 on the device, row + 1 of each.
            tokens: `[S]` int64 on the device.
            owners: (request, index of the token in it, row) of each.
        """
        self._store(self._tokens, places, tokens)
        for request, index, row in owners:
            self._owners[row] = (request, index)

    def resolve(self, input_ids: Tensor, pending: Sequence[tuple[Request, int, int]]) -> Tensor:
        """`input_ids` with every id below 0 replaced by the token at its place.

        Args:
            input_ids: `[T]` int64, `-(row + 1)` for a pending token.
            pending: (request, index of the token in it, row) of each pending token.

        Raises:
            StepOrderError: a pending token was not sampled yet.
        """
        if not pending:
            return input_ids
        for request, index, row in pending:
            if self._owners[row] != (request, index):
                raise StepOrderError(
                    f"request {request.request_id!r}: its token {index} is pending, but no step has sampled it. Call "
                    f"sample() of a step before the launch of the next one that needs its tokens."
                )
        return self._resolve(input_ids, self._tokens)


def resolve_reference(input_ids: Tensor, future: Tensor) -> Tensor:
    """`input_ids` (`[T]` int64) with every id `-place` replaced by the token of `future` (`[places]` int64) there."""
    return torch.where(input_ids < 0, future[input_ids.clamp(max=0).neg()], input_ids)


def store_reference(future: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Write every token (`[S]`) to its place (`[S]` int64) of `future` (`[places]` int64)."""
    future.index_copy_(0, places, tokens)
