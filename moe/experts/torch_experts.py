"""What experts in torch's own operations share: biases, and activations other than SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts.base import FusedExperts
from ubatch import ConfigError


@dataclass(frozen=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gates up to `limit` and ups from `-limit` to `limit`.

    Source: gpt-oss (2025).
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gates and ups have the same shape, which is the result's, too."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


class TorchExperts(FusedExperts):
    """Experts that may have biases, and another activation.

    Args:
        w13, w2, first_expert: see `FusedExperts`.
        b13: `[E_local, 2 * I]`, biases of the gate projections, then of the up projections; None for none.
        b2: `[E_local, H]`, biases of the down projections; None for none.
        activation: in place of `silu(gate) * up`.

    Raises:
        ConfigError: see `FusedExperts`; or a bias does not fit its weight.
    """

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        first_expert: int = 0,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        activation: ClampedSwiGLU | None = None,
    ) -> None:
        super().__init__(w13, w2, first_expert)
        self.b13, self.b2 = _bias("b13", b13, w13), _bias("b2", b2, w2)
        self.activation = activation

    def activate(self, gate_up: Tensor) -> Tensor:
        """The activation of `[..., 2 * I]`: the gates, then the ups."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up if self.activation is None else self.activation(gate, up)


def _bias(name: str, bias: Tensor | None, weight: Tensor) -> nn.Parameter | None:
    if bias is None:
        return None
    if bias.shape != weight.shape[:2] or bias.dtype != weight.dtype or bias.device != weight.device:
        raise ConfigError(
            f"{name} must be {list(weight.shape[:2])} {weight.dtype} on {weight.device} to fit its weight, not "
            f"{list(bias.shape)} {bias.dtype} on {bias.device}."
        )
    return nn.Parameter(bias, requires_grad=False)
