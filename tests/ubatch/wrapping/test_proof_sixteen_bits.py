"""In 16 bits a router's near-ties must not retire a signature, and a coupling of rows must.

`PYTHONPATH=. python tests/ubatch/wrapping/test_proof_sixteen_bits.py 200` proves a 100 M Qwen3-MoE so often.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ubatch import DeclineReason, UBatchConfig, UBatchWrapper

pytestmark = pytest.mark.long

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16}
LARGE = {"hidden_size": 512, "num_hidden_layers": 8, "num_experts": 32, "moe_intermediate_size": 256, "head_dim": 64}


def proofs(shape: dict[str, int], count: int) -> Iterator[str]:
    """Prove so many calls of a model in bfloat16, each of other tokens, and each of a wrapper that knows nothing."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts_per_tok=4,
        **shape,
    )
    model = Qwen3MoeForCausalLM(config).eval().bfloat16()
    settings = UBatchConfig(dbo_prefill_token_threshold=2, dbo_decode_token_threshold=2)
    with torch.inference_mode():
        for number in range(count):
            wrapper = UBatchWrapper(model, settings)
            rows, length = 2 + number % 11, 1 + number * 7 % 40
            for _ in range(2):
                wrapper(torch.randint(1000, (rows, length)), use_cache=False)
            statistics = wrapper.statistics()
            wrapper.close()
            yield "proved" if statistics.proved == 2 else str(statistics.last_reason)


def test_near_ties_retire_nothing() -> None:
    assert Counter(proofs(SMALL, 10)) == {"proved": 10}


def test_a_coupling_beside_the_cut_is_found() -> None:
    """One row in a thousand is off, and only next to the cut: few enough to be near-ties."""

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cat([x[:1] * 0, x[:-1]])

    wrapper = UBatchWrapper(Shift())
    x = torch.randn(1024, 8).bfloat16()
    for _ in range(4):
        assert torch.equal(wrapper(x), Shift()(x))
    statistics = wrapper.statistics()
    wrapper.close()
    assert statistics.engaged == 0
    assert statistics.declined[DeclineReason.ROWS_DEPEND] >= 2


if __name__ == "__main__":
    print(Counter(proofs(LARGE, int(sys.argv[1]))))
