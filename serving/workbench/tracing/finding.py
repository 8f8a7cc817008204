"""A finding: the result of one rule of the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FindingKind(StrEnum):
    PROBLEM = "problem"
    """overlap costs time"""
    HINT = "hint"
    """overlap could gain more"""
    GOOD = "good"
    FACT = "fact"


@dataclass(frozen=True)
class Finding:
    """One finding of the diagnosis: a sentence, and its numbers by name; shares are fractions, times are seconds."""

    kind: FindingKind
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
