"""The forward modes, as one table: tokens per request, how a batch is cut, which kernel runs, graph or not.

A new mode is added here; planners and back ends read this table instead of listing modes themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ubatch import ConfigError, ForwardMode
from ubatch.errors import shown


class SplitKind(StrEnum):
    """How a batch of a mode is cut into lanes."""

    FIXED = "fixed"
    """every request has the same number of tokens: cut by request count"""
    BY_LENGTH = "by_length"
    """balanced by tokens, also inside a request (two-chunk), or balanced by cost"""
    EMPTY = "empty"
    """empty lanes, which still take part in every collective"""
    NEVER = "never"
    """never cut"""


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
        split: how a batch is cut into lanes.
        kernel: which kind of kernel runs it.
        graph: whether its shapes are fixed, so that back ends plan it for a CUDA graph and runners capture it. An idle
            batch takes the shapes of the graph that it is padded to.
        sglang: SGLang's name of the mode.
        refused: what is not supported in this mode, in words; empty if everything is.
    """

    tokens_per_request: str
    split: SplitKind
    kernel: Kernel
    graph: bool
    sglang: str
    refused: str = ""


MODES: Mapping[ForwardMode, ModeTraits] = {
    ForwardMode.DECODE: ModeTraits("1", SplitKind.FIXED, Kernel.DECODE, graph=True, sglang="DECODE"),
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
"""Every forward mode. SGLang's DRAFT_EXTEND_V2 is `DRAFT_EXTEND` here; SGLang has removed its first version."""


_RECURRENT = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"))
"""Kinds of layers that keep a state instead of keys and values, alone or with attention; names as in configs."""


def refuse_unsupported_model(architecture: str, *, encoder_decoder: bool, layer_types: tuple[str, ...]) -> None:
    """Refuse models whose attention has no row in the table.

    Args:
        architecture: the architecture's name in the checkpoint.
        encoder_decoder: whether its config says `is_encoder_decoder`.
        layer_types: `layer_types` of its config, empty if it has none.

    Raises:
        ConfigError: the model is an encoder-decoder, has linear (hybrid) attention, or attention of another kind.
    """
    if encoder_decoder:
        raise ConfigError(f"{architecture} is an encoder-decoder model; only decoder-only models are supported.")
    known = {"full_attention", "sliding_attention", "attention"}
    strange = sorted(set(layer_types) - known)
    other = [kind for kind in strange if kind not in _RECURRENT]
    if other:
        raise ConfigError(
            f"{architecture} has {shown(other[0])} layers; only models whose layers all have full or sliding-window "
            f"attention are supported."
        )
    if strange:
        raise ConfigError(
            f"{architecture} mixes {shown(strange[0])} layers with attention (a hybrid model); only models whose "
            f"layers all are softmax attention are supported."
        )
