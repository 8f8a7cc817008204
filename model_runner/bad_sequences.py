"""Sequences of tokens that an output must not contain: which tokens would complete one now."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BadSequences"]


class BadSequences:
    """Some token sequences, by the token before their last one: only those that may be complete now are compared.

    Args:
        sequences: none of them empty.

    Attributes:
        single: tokens that are a sequence by themselves, so that they never come.
        reach: how many of the last tokens decide which others would complete a sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.single = tuple(sequence[0] for sequence in sequences if len(sequence) == 1)
        self.reach = max((len(sequence) - 1 for sequence in sequences), default=0)
        self._by_token_before: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                *before, last = sequence
                self._by_token_before.setdefault(before[-1], []).append((before, last))

    def completing(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a sequence of several, behind this output (or its last `reach` tokens)."""
        if not output:
            return []
        tail = list(output[-self.reach :])
        candidates = self._by_token_before.get(tail[-1], ())
        return [last for before, last in candidates if tail[-len(before) :] == before]
