"""Linear attention in Triton's interpreter, as on a GPU; and its heads, as the reference takes them."""

from __future__ import annotations

import pytest
from torch import Tensor

from attention import GatedDeltaShape
from attention.linear.delta_rule import normalised


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """Have linear layers on the CPU run in Triton."""
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    from ubatch.kernels.triton_jit import INTERPRETED

    if not INTERPRETED:
        pytest.skip("Triton's interpreter is off: TRITON_INTERPRET=1 was not set before Triton was imported")
    patch.setattr("attention.lanes.runs_in_triton", lambda device: True)


def heads_of(mixed: Tensor, shape: GatedDeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[T, v_heads, dim]` of what the convolution gives, `[T, conv_dim]`."""
    q, k, v = mixed.float().split((shape.key_size, shape.key_size, shape.value_size), dim=-1)
    heads, groups = (len(mixed), shape.num_k_heads, shape.k_dim), shape.num_v_heads // shape.num_k_heads
    q = normalised(q.reshape(heads), shape.k_dim**-0.5).repeat_interleave(groups, dim=1)
    k = normalised(k.reshape(heads), 1.0).repeat_interleave(groups, dim=1)
    return q, k, v.reshape(len(mixed), shape.num_v_heads, shape.v_dim)
