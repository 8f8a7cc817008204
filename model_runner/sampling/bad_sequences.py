"""Sequences of tokens that an output must not contain: which tokens would complete one now."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BadSequences"]


class BadSequences:
    """Some token sequences, looked up by the tokens before their last one: the work is once per length of these.

    Args:
        sequences: none of them empty.

    Attributes:
        single: tokens that are a sequence by themselves, so that they never come.
        reach: how many of the last tokens decide which others would complete a sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.single = tuple(sequence[0] for sequence in sequences if len(sequence) == 1)
        self._last_of: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sequences:
            if before:
                self._last_of.setdefault(tuple(before), []).append(last)
        self._lengths = sorted(set(map(len, self._last_of)))
        self.reach = self._lengths[-1] if self._lengths else 0

    def completing(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a sequence of several, behind this output (or its last `reach` tokens)."""
        tails = (tuple(output[-length:]) for length in self._lengths if length <= len(output))
        return [last for tail in tails for last in self._last_of.get(tail, ())]
