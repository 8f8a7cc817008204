"""Rotary position embeddings: the scalings that checkpoints ask for, and the two ways attention takes them.

Rope        as published
LinearRope  every frequency divided by a factor
Llama3Rope  low frequencies divided, high ones kept, a ramp between
YarnRope    the same with a ramp over the dimensions, and scores that grow with the factor

RotaryEmbedding  -> Rotation   multi-head attention: the layer rotates queries and keys itself
RotaryTable      -> RopeTable  multi-head latent attention: the back end rotates, in one kernel with what it fuses
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention import RopeTable
from model_runner.weights.hf_config import HFConfig
from ubatch.streams.small_copies import to_device

__all__ = [
    "LinearRope",
    "Llama3Rope",
    "Rope",
    "RotaryEmbedding",
    "RotaryTable",
    "Rotation",
    "YarnRope",
    "read_rope",
]


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings without scaling.

    Attributes:
        theta: the base of the frequencies.
        attention_factor: on cosines and sines, so the scores of rotated dimensions have its square.
        softmax_factor: on the scale of all scores; for latent attention, which sets its own scale.

    Source: Su et al., RoFormer, 2021.
    """

    theta: float
    attention_factor: float = 1.0
    softmax_factor: float = 1.0

    def inverse_frequencies(self, dim: int) -> Tensor:
        """`[dim / 2]` float32: radians per position of every pair of the `dim` dimensions that are rotated."""
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
    """Frequencies by how often they turn within the original context.

    Attributes:
        factor: divides those that turn at most `low_freq_factor` times.
        low_freq_factor, high_freq_factor: between them the division fades out.
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
    """Frequencies by dimension: those before the ramp are kept, those behind it divided.

    Attributes:
        factor: divides.
        original_max_position: tokens of the original context.
        beta_fast, beta_slow: the ramp goes from the dimension that turns so often in it to the one that turns so often.
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
        """Which pair of dimensions turns so often within the original context."""
        return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def read_rope(config: HFConfig, default_theta: float = 10_000.0) -> Rope:
    """What `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before), say.

    Args:
        config: the checkpoint's.
        default_theta: the family's base, where the config has none.

    Raises:
        CheckpointError: a scaling that is not supported, or one that lacks a number it needs.
    """
    values = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.wrong("rope_parameters", values, "the same rotary embeddings in all layers")
    for partial in (values.get("partial_rotary_factor"), config.values.get("partial_rotary_factor")):
        if partial not in (None, 1):
            raise config.wrong("partial_rotary_factor", partial, "1: rotary embeddings of the whole head")
    rope = HFConfig(values, config.path)
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return LinearRope(theta, factor=rope.number("factor"))
    if kind == "llama3":
        return Llama3Rope(
            theta,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=_original_max_position(config, rope),
        )
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
    """How much sharper attention must be over a context that is `factor` times longer; YaRN, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _original_max_position(config: HFConfig, rope: HFConfig) -> int:
    name = "original_max_position_embeddings"
    if config.values.get(name) is not None:  # some families keep it outside
        return config.integer(name)
    return rope.integer(name, default=config.integer("max_position_embeddings"))


@dataclass(frozen=True)
class Rotation:
    """The rotation of a step's tokens, pairs being dimensions `i` and `i + head_dim / 2`; once per step, not per layer.

    Attributes:
        cos: `[T, 1, head_dim]`.
        sin: `[T, 1, head_dim]`, negative in its first half, so that rotating is a product and a multiply-add.
    """

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """`x` `[T, heads, head_dim]` rotated to its tokens' positions."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, dims=-1), self.sin)


class RotaryEmbedding(nn.Module):
    """Makes the `Rotation` of a step, in the "rotate half" order of Hugging Face checkpoints.

    Args:
        rope: frequencies and factor.
        head_dim: numbers per head; even.
        dtype: of queries and keys.
        device: where.
    """

    inv_freq: Tensor

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.factor = rope.attention_factor
        self.dtype = dtype
        (inv_freq,) = to_device([rope.inverse_frequencies(head_dim)], device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Of tokens at `positions` `[T]`."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return Rotation(
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(self.dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(self.dtype),
        )


class RotaryTable(nn.Module):
    """Makes the `RopeTable` of a step: one table for all steps, and the step's positions.

    Args:
        rope: frequencies and factor.
        rope_dim: numbers of the rotated part; even.
        num_positions: rows of the table; the longest sequence.
        interleaved: pairs are neighbours.
        device: where.
    """

    cos_sin: Tensor

    def __init__(
        self, rope: Rope, rope_dim: int, num_positions: int, *, interleaved: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * rope.inverse_frequencies(rope_dim)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        (cos_sin,) = to_device([table], device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, positions: Tensor) -> RopeTable:
        """Of tokens at `positions` `[T]`."""
        return RopeTable(self.cos_sin, positions, self.interleaved)
