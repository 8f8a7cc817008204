"""What a rule of the diagnosis says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "FindingKind"]


class FindingKind(StrEnum):
    """How to take a finding."""

    PROBLEM = "problem"
    """overlap costs time"""
    HINT = "hint"
    """it could gain more"""
    GOOD = "good"
    FACT = "fact"


@dataclass(frozen=True)
class Finding:
    """A sentence.

    Attributes:
        kind: how to take it.
        text: the sentence.
        figures: its numbers, by name; shares and changes as fractions, times in seconds.
    """

    kind: FindingKind
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
