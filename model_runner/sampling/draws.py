"""Uniform random numbers that depend only on a seed and an index.

A request's output token `i` uses number `i` of its seed. So the number does not depend on the rest of the batch, on the
order of sampling, or on repetitions after a retraction. A generator with a state could not guarantee that.

Source: SplitMix64, the output function of Steele, Lea and Flood (2014).
"""

from __future__ import annotations

import os

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """Number `index` of `seed`: 53 random bits, at least 0 and below 1.

    Args:
        seed: any integer; only the lowest 64 bits are used.
        index: 0 or more.
    """
    # The seed is mixed first, so that sequences of neighbouring seeds do not overlap.
    return (_mix(_mix(seed & _WORD) + (index + 1) * _GOLDEN & _WORD) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A random 64-bit seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little")


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
