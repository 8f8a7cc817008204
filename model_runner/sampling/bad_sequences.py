"""Token sequences that an output must not contain: finds the tokens that would complete one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BadSequences"]


class BadSequences:
    """Token sequences, none of them empty, indexed by their tokens before the last one; a look-up costs one step per
    different length.

    Attributes:
        single: tokens that are a sequence by themselves, so they are always forbidden.
        reach: number of last output tokens that a look-up needs.
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
        """Tokens that, after this output (or its last `reach` tokens), would complete a sequence of several tokens."""
        tails = (tuple(output[-length:]) for length in self._lengths if length <= len(output))
        return [last for tail in tails for last in self._last_of.get(tail, ())]
