"""Rotary position embeddings: the scalings that checkpoints use, and the two forms that attention needs.

Rope        without scaling
LinearRope  every frequency divided by a factor
Llama3Rope  low frequencies divided, high ones kept, a ramp between
YarnRope    the same with a ramp over the dimensions, and scores that grow with the factor

RotaryEmbedding  -> Rotation   multi-head attention: the layer rotates queries and keys itself
RotaryTable      -> RopeTable  multi-head latent attention: the back end rotates, in a fused kernel
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attention import RopeTable
from model_runner.weights.files import LONGEST_CONTEXT, HFConfig
from ubatch.streams import to_device

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings without scaling.

    Attributes:
        theta: the base of the frequencies.
        attention_factor: multiplies cosines and sines, so scores of rotated dimensions are multiplied by its square.
        softmax_factor: multiplies the scale of all scores; for latent attention, which sets its own scale.
        partial_rotary_factor: share of a head's dimensions that are rotated: its first ones.

    Source: Su et al., RoFormer, 2021.
    """

    theta: float
    attention_factor: float = 1.0
    softmax_factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def inverse_frequencies(self, dim: int) -> Tensor:
        """Radians per position of each pair of dimensions, `[dim / 2]` float32; `dim` dimensions are rotated."""
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / self.theta**exponent


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor`.

    Source: Chen et al., Extending Context Window of Large Language Models via Positional Interpolation, 2023.
    """

    factor: float

    def inverse_frequencies(self, dim: int) -> Tensor:
        """See `Rope`."""
        return super().inverse_frequencies(dim) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Frequencies scaled by their number of turns within the original context.

    Attributes:
        factor: divides the frequencies that turn at most `low_freq_factor` times.
        low_freq_factor, high_freq_factor: numbers of turns between which the division fades out.
        original_max_position: tokens of the original context.

    Source: the Llama 3 Herd of Models (2024); rope type `llama3` of transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def inverse_frequencies(self, dim: int) -> Tensor:
        """See `Rope`."""
        plain = super().inverse_frequencies(dim)
        turns = self.original_max_position * plain / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """Frequencies scaled by dimension: kept before a ramp, divided by `factor` after it, blended on it.

    Attributes:
        factor: the divisor.
        original_max_position: tokens of the original context.
        beta_fast, beta_slow: turns within the original context of the ramp's first and last dimension.
        truncate: the ramp starts and ends at whole dimensions.

    Source: Peng et al., YaRN, 2023, section 3.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inverse_frequencies(self, dim: int) -> Tensor:
        """See `Rope`."""
        first, last = self._dimension(self.beta_fast, dim), self._dimension(self.beta_slow, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = (last - first) or 0.001  # a ramp without length is a step
        divided = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        plain = super().inverse_frequencies(dim)
        return plain / self.factor * divided + plain * (1 - divided)

    def _dimension(self, turns: float, dim: int) -> float:
        """Index of the pair of dimensions that turns `turns` times within the original context."""
        return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def read_rope(config: HFConfig, default_theta: float = 10_000.0, default_partial: float | None = None) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (earlier versions).

    Args:
        default_theta: the family's base, used if the config has none.
        default_partial: the family's `partial_rotary_factor`, used if the config has none; None for a family that
            rotates whole heads, whatever a config says.

    Raises:
        CheckpointError: a scaling that is not supported, or one that lacks a number it needs; or a part of a head is to
            be rotated in a family that rotates whole heads.
    """
    rope = _entries(config)
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", default_partial or 1.0))
    if partial > 1:
        raise config.wrong("partial_rotary_factor", partial, "at most 1: the whole head")
    if default_partial is None and partial != 1:
        raise config.wrong("partial_rotary_factor", partial, "1: it rotates whole heads")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    return replace(_read_scaling(config, rope, theta), partial_rotary_factor=partial)


def read_longest_context(config: HFConfig) -> int:
    """Longest sequence in tokens: original context x factor if a YaRN or linear scaling names the original.

    Otherwise it is `max_position_embeddings`. Qwen3's recipe for longer contexts adds the scaling and leaves that entry
    as it was; DeepSeek's entry is the product already.

    Raises:
        CheckpointError: an entry is missing or invalid.
    """
    limit, rope = config.integer("max_position_embeddings"), _entries(config)
    if _kind(rope) not in ("linear", "yarn") or not any(each.values.get(_ORIGINAL) for each in (config, rope)):
        return limit
    original = _original_max_position(config, rope)
    factor = rope.number("factor", limit / original)
    if not 1 <= original * factor <= LONGEST_CONTEXT:
        wanted = f"its {original} original positions times it to be from 1 to {LONGEST_CONTEXT} tokens"
        raise config.wrong("factor", factor, wanted)
    return int(original * factor)


def _entries(config: HFConfig) -> HFConfig:
    """The entries of the rotary embeddings, by either of their names."""
    values = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.wrong("rope_parameters", values, "the same rotary embeddings in all layers")
    return HFConfig(values, config.path)


def _kind(rope: HFConfig) -> object:
    return rope.values.get("rope_type", rope.values.get("type", "default"))


def _read_scaling(config: HFConfig, rope: HFConfig, theta: float) -> Rope:
    kind = _kind(rope)
    if kind != "yarn" and rope.values.get("mscale_all_dim"):
        raise config.wrong("mscale_all_dim", rope.values["mscale_all_dim"], "rope type 'yarn' to have it")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return LinearRope(theta, factor=rope.number("factor"))
    if kind == "llama3":
        factors = {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor", "factor")}
        low, high, _ = factors.values()
        if high <= low:
            raise config.wrong("high_freq_factor", high, f"more than its low_freq_factor, {low}")
        return Llama3Rope(theta, original_max_position=_original_max_position(config, rope), **factors)
    if kind == "yarn":
        return _read_yarn(config, rope, theta)
    raise config.wrong("rope type", kind, "one of 'default', 'linear', 'llama3', 'yarn'")


def _read_yarn(config: HFConfig, rope: HFConfig, theta: float) -> YarnRope:
    original = _original_max_position(config, rope)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    mscale, mscale_all_dim = rope.number("mscale", 0.0, or_zero=True), rope.number("mscale_all_dim", 0.0, or_zero=True)
    if mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        attention_factor = _mscale(factor, 1.0)
    return YarnRope(
        theta,
        attention_factor=rope.number("attention_factor", attention_factor, or_zero=True),
        softmax_factor=_mscale(factor, mscale_all_dim) ** 2,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _mscale(factor: float, weight: float) -> float:
    """Factor on attention scores for a context that is `factor` times longer; YaRN, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _original_max_position(config: HFConfig, rope: HFConfig) -> int:
    if config.values.get(_ORIGINAL) is not None:  # some families keep it outside the rope entry
        return config.integer(_ORIGINAL)
    return rope.integer(_ORIGINAL, default=config.integer("max_position_embeddings"))


@dataclass(frozen=True)
class Rotation:
    """Rotation of a step's tokens in pairs of dimensions `i` and `i + rotary_dim / 2`; made once per step.

    The first `rotary_dim` dimensions of a head are rotated; in most families that is all of them.

    Attributes:
        cos: `[T, 1, rotary_dim]` float32.
        sin: the same shape, negative in its first half, so that rotating is a product and a multiply-add.
    """

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate `x` `[T, heads, head_dim]` to its tokens' positions: in float32, rounded once to its dtype."""
        dim = self.cos.shape[-1]
        if dim < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :dim]), x[..., dim:]), dim=-1)
        return torch.addcmul(x * self.cos, x.roll(dim // 2, dims=-1), self.sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Makes the `Rotation` of a step, in the "rotate half" order of Hugging Face checkpoints.

    `rope.rotary_dim(head_dim)` is even.
    """

    inv_freq: Tensor

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.factor = rope.attention_factor
        (inv_freq,) = to_device([rope.inverse_frequencies(rope.rotary_dim(head_dim))], device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` `[T]`."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return Rotation(torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1))


class RotaryTable(nn.Module):
    """Makes the `RopeTable` of a step: one table for all steps, and the step's positions.

    Args:
        rope_dim: size of the rotated part of a head; even.
        num_positions: rows of the table: tokens of the longest sequence.
        interleaved: a rotated pair is two neighbouring dimensions.
    """

    cos_sin: Tensor

    def __init__(
        self, rope: Rope, rope_dim: int, num_positions: int, *, interleaved: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * rope.inverse_frequencies(rope_dim)
        table = torch.empty(num_positions, rope_dim)  # filled in place: for millions of positions it is gigabytes
        torch.cos(angles, out=table[:, : rope_dim // 2])
        torch.sin(angles, out=table[:, rope_dim // 2 :])
        table *= rope.attention_factor
        (cos_sin,) = to_device([table], device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, positions: Tensor) -> RopeTable:
        """The table for tokens at `positions` `[T]`."""
        return RopeTable(self.cos_sin, positions, self.interleaved)
