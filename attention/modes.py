"""The forward modes, as one table: what a request brings, how a batch is cut, which kernel runs, graph or not.

This is the place to look when a mode is new; planners and back ends ask it instead of listing modes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ubatch import ConfigError, ForwardMode

__all__ = ["MODES", "Kernel", "ModeTraits", "SplitKind", "refuse_unsupported_model"]


class SplitKind(StrEnum):
    """How a batch of a mode is cut into lanes."""

    FIXED = "fixed"
    """every request has as many tokens: by request count"""
    BY_LENGTH = "by_length"
    """balanced, through a request (two-chunk), or by cost"""
    EMPTY = "empty"
    """empty lanes, which pass every collective point"""
    NEVER = "never"
    """always unsplit"""


class Kernel(StrEnum):
    """Which kind of attention kernel runs a batch."""

    DECODE = "decode"
    """few queries per request against a long cache"""
    PREFILL = "prefill"
    """ragged queries"""
    NONE = "none"


@dataclass(frozen=True)
class ModeTraits:
    """One row of the table.

    Attributes:
        tokens_per_request: in words.
        split: how it is cut.
        kernel: what runs it.
        graph: whether its shapes are fixed, so that back ends plan it for a CUDA graph, and runners capture it. An idle
            batch has those of whatever graph it is padded to.
        sglang: what SGLang calls it.
        refused: what does not work in it, in words; empty for nothing.
    """

    tokens_per_request: str
    split: SplitKind
    kernel: Kernel
    graph: bool
    sglang: str
    refused: str = ""


MODES: Mapping[ForwardMode, ModeTraits] = {
    ForwardMode.DECODE: ModeTraits(
        "1",
        SplitKind.FIXED,
        Kernel.DECODE,
        graph=True,
        sglang="DECODE",
    ),
    ForwardMode.PREFILL: ModeTraits(
        "any number (SGLang: extend)",
        SplitKind.BY_LENGTH,
        Kernel.PREFILL,
        graph=False,
        sglang="EXTEND",
        refused="capture: its shapes are not fixed",
    ),
    ForwardMode.MIXED: ModeTraits(
        "1, or any number",
        SplitKind.BY_LENGTH,
        Kernel.PREFILL,
        graph=False,
        sglang="MIXED",
        refused="capture, as above; drafts: its decodes run without",
    ),
    ForwardMode.IDLE: ModeTraits("no request", SplitKind.EMPTY, Kernel.NONE, graph=True, sglang="IDLE"),
    ForwardMode.TARGET_VERIFY: ModeTraits(
        "the drafts, all alike",
        SplitKind.FIXED,
        Kernel.DECODE,
        graph=True,
        sglang="TARGET_VERIFY",
        refused="a cut inside a request; trees on back ends without a tree mask",
    ),
    ForwardMode.DRAFT_EXTEND: ModeTraits(
        "the accepted drafts, 1 or more",
        SplitKind.NEVER,
        Kernel.DECODE,
        graph=True,
        sglang="DRAFT_EXTEND_V2",
        refused="lanes: drafting runs alone",
    ),
}
"""Every forward mode. SGLang's DRAFT_EXTEND_V2 is `DRAFT_EXTEND` here; its first version is gone there, too."""


def refuse_unsupported_model(architecture: str, *, encoder_decoder: bool, layer_types: tuple[str, ...]) -> None:
    """Refuse models whose attention has no row in the table.

    Args:
        architecture: what the checkpoint calls itself.
        encoder_decoder: whether its config says `is_encoder_decoder`.
        layer_types: `layer_types` of its config, empty where there is none.

    Raises:
        ConfigError: encoder-decoder, or linear (hybrid) attention; says which.
    """
    if encoder_decoder:
        raise ConfigError(f"{architecture} is an encoder-decoder model; only decoder-only models are supported.")
    known = {"full_attention", "sliding_attention", "attention"}
    strange = sorted(set(layer_types) - known)
    if strange:
        raise ConfigError(
            f"{architecture} mixes {strange[0]!r} layers with attention (a hybrid model); only models whose layers all "
            f"are softmax attention are supported."
        )
