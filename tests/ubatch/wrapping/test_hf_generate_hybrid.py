"""`generate` through the wrapper with caches of hybrid, state-space and encoder-decoder models, and static caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cache_families import CASES, assert_held, call, held, model_of, prompts
from torch import Tensor
from wrapping import wrapped

from ubatch import dbo_current_ubatch_id

pytestmark = pytest.mark.long

NEW, ROWS = 6, 5

HYBRID = ["lfm2", "jamba", "qwen3_next", "mamba", "mamba2", "falcon_mamba", "bamba", "falcon_h1", "zamba2", "minimax"]
OTHERS = ["gemma3", "deepseek_v4", "glm_moe_dsa", "t5", "bart"]
QUICK = ["lfm2", "mamba2", "qwen3_next", "gemma3", "t5"]
STATIC = {"cache_implementation": "static"}
SPLIT_DIMS = {"decoder_input_ids": 0, "decoder_attention_mask": 0, "encoder_outputs": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 2},
}


def generate(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(2)
    return model.generate(prompts(ROWS), **{"max_new_tokens": NEW, "do_sample": False, **options})


def settings(model: Any) -> dict[str, Any]:
    return {"split_dims": SPLIT_DIMS} if model.config.is_encoder_decoder else {}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in [*HYBRID, *OTHERS]]
)
def test_the_tokens_are_the_untouched_models(name: str, way: str) -> None:
    model = model_of(name)
    expected = generate(model, **WAYS[way])
    assert len(expected.unique()) > 2, "all rows say the same"
    with wrapped(model, **settings(model)) as wrapper:
        assert torch.equal(generate(wrapper, **WAYS[way]), expected)
        seen = wrapper.statistics()
    assert (seen.engaged, dict(seen.declined)) == (NEW, {})


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "falcon_h1", "glm_moe_dsa"])
def test_static_caches(name: str) -> None:
    model = model_of(name)
    with wrapped(model, split_dims={"attention_mask": 0}) as wrapper:  # one mask per kind of layer, `[B, 1, S, length]`
        assert torch.equal(generate(wrapper, **STATIC), generate(model, **STATIC))
        assert wrapper.statistics().engaged == NEW


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_cache_that_is_written_in_place_is_untouched_when_a_lane_fails(case: str) -> None:
    """And filled by the next call as if nothing had been."""
    model, make = model_of(CASES[case][0]), CASES[case][1]

    def fail(module: Any, args: Any, output: Any) -> None:
        if dbo_current_ubatch_id() == 1:
            raise ValueError("broken head")

    ours, plain = make(model), make(model)
    first, second = prompts(length=5).split([4, 1], 1)
    with wrapped(model, **settings(model)) as wrapper:
        call(wrapper, first, slice(None), ours)
        call(model, first, slice(None), plain)
        before = copy.deepcopy(held(ours))
        handle = model.register_forward_hook(fail)
        try:
            with pytest.raises(ValueError, match="broken head"):
                call(wrapper, second, slice(None), ours)
        finally:
            handle.remove()
        assert_held(held(ours), before, exact=True)
        result, expected = call(wrapper, second, slice(None), ours), call(model, second, slice(None), plain)
        assert wrapper.statistics().engaged == 2
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert_held(held(ours), held(plain), exact=False)
