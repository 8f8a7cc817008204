"""Hugging Face's `generate` through the wrapper: the same tokens as the untouched model, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_families import assert_held, held
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM
from wrapping import assert_same, wrapped

from ubatch import DeclineReason, Point, UBatchWrapper, dbo_yield, interleave, tracing

pytestmark = pytest.mark.long

ROWS, LENGTH, NEW = 6, 7, 8


def make_model(**overrides: Any) -> Qwen3MoeForCausalLM:
    """Two layers, random, far from uniform logits; lanes hand on around every MoE block."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **overrides,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: dbo_yield(Point.DISPATCH))
        layer.mlp.register_forward_hook(lambda module, args, output: dbo_yield(Point.COMBINE))
    return model


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    return make_model()


@pytest.fixture
def wrapper(model: Qwen3MoeForCausalLM) -> Iterator[UBatchWrapper]:
    with wrapped(model) as made:
        yield made


def prompts(rows: int = ROWS) -> Tensor:
    return torch.randint(1, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def left_padded() -> dict[str, Tensor]:
    ids, mask = prompts(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, padding in enumerate((0, 3, 0, 6, 1, 0)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(2)
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "all there is": {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_the_untouched_models(model: Qwen3MoeForCausalLM, way: str, padded: bool, lanes: int) -> None:
    inputs = left_padded() if padded else {"input_ids": prompts()}
    expected = generate(model, inputs, **WAYS[way])
    with wrapped(model, num_ubatches=lanes) as wrapper, tracing() as trace:
        result = generate(wrapper, inputs, **WAYS[way])
        seen = wrapper.statistics()
    if isinstance(expected, Tensor):
        assert torch.equal(result, expected)
    else:
        assert torch.equal(result.sequences, expected.sequences)
        assert_same(result.hidden_states, expected.hidden_states)
        assert_same(result.logits, expected.logits)
        assert_caches_equal(result.past_key_values, expected.past_key_values)
    assert (seen.calls, seen.engaged, dict(seen.declined)) == (NEW, NEW, {})
    assert trace.order == interleave([["dispatch", "combine"] * 2] * lanes) * NEW


def test_prefill_and_decode_steps_have_thresholds_of_their_own(model: Qwen3MoeForCausalLM) -> None:
    expected = generate(model, left_padded())
    few, many = ROWS, ROWS * LENGTH
    for decode, prefill, engaged, declined in (
        (few, many, NEW, {}),
        (few, many + 1, NEW - 1, {DeclineReason.BELOW_PREFILL_THRESHOLD: 1}),
        (few + 1, many, 1, {DeclineReason.BELOW_DECODE_THRESHOLD: NEW - 1}),
    ):
        settings = {"dbo_decode_token_threshold": decode, "dbo_prefill_token_threshold": prefill}
        with wrapped(model, **settings) as wrapper:
            assert torch.equal(generate(wrapper, left_padded()), expected)
            assert (wrapper.statistics().engaged, dict(wrapper.statistics().declined)) == (engaged, declined)


# ------------------------------------------------------------------------------------------------------- the cache


def assert_caches_equal(result: DynamicCache, expected: DynamicCache) -> None:
    assert_held(held(result), held(expected), exact=False)


@pytest.mark.parametrize("lazy", [False, True])
@torch.inference_mode()
def test_a_cache_is_filled_in_place_step_by_step(
    model: Qwen3MoeForCausalLM, wrapper: UBatchWrapper, lazy: bool
) -> None:
    """With layers from the start or made as they are met, over chunks and single tokens."""
    make = DynamicCache if lazy else lambda: DynamicCache(config=model.config)
    ours, plain = make(), make()
    for chunk in prompts().split([3, 2, 1, 1], 1):
        expected = model(input_ids=chunk, past_key_values=plain, output_hidden_states=True)
        result = wrapper(input_ids=chunk, past_key_values=ours, output_hidden_states=True)
        assert result.past_key_values is ours
        assert type(result) is type(expected)
        assert list(result) == list(expected)
        assert isinstance(result.hidden_states, tuple)
        assert_same(result.hidden_states, expected.hidden_states)
        torch.testing.assert_close(result.logits, expected.logits)
        assert_caches_equal(ours, plain)
    assert wrapper.statistics().engaged == 4
    for cache in (ours, plain):
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([4, 1]))
    assert_caches_equal(ours, plain)


def test_a_cache_that_the_model_makes_is_merged(model: Qwen3MoeForCausalLM, wrapper: UBatchWrapper) -> None:
    result, expected = wrapper(prompts()), model(prompts())
    assert wrapper.statistics().engaged == 1
    assert_caches_equal(result.past_key_values, expected.past_key_values)
    as_tuple = wrapper(prompts(), return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], expected.logits)
    assert_caches_equal(as_tuple[1], expected.past_key_values)


def test_generation_goes_on_from_a_cache(model: Qwen3MoeForCausalLM, wrapper: UBatchWrapper) -> None:
    expected = generate(model, left_padded(), max_new_tokens=2 * NEW)
    cache = DynamicCache(config=model.config)
    first = generate(wrapper, left_padded(), past_key_values=cache)
    assert cache.get_seq_length() == LENGTH + NEW - 1
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(ROWS, NEW, dtype=torch.long)], 1)
    second = generate(wrapper, {"input_ids": first, "attention_mask": mask}, past_key_values=cache)
    assert torch.equal(second, expected)
    assert wrapper.statistics().declined == {}


def test_other_outputs(model: Qwen3MoeForCausalLM) -> None:
    """A loss has no dimensions; router logits have one row per token."""
    ids = prompts()
    with wrapped(model, verify="first") as wrapper:
        for others in ({"labels": ids}, {"output_router_logits": True}):
            for _ in range(2):
                expected = model(ids, use_cache=False, **others)
                assert_same(wrapper(ids, use_cache=False, **others), expected)
        assert wrapper.statistics().declined == {DeclineReason.ZERO_DIM_OUTPUT: 4}
        expected = model(ids)
        for keep, columns in ((1, [-1]), (torch.tensor([0, 2]), [0, 2])):
            for _ in range(2):
                kept = wrapper(ids, logits_to_keep=keep)
                torch.testing.assert_close(kept.logits, expected.logits[:, columns])
        assert wrapper.statistics().engaged == 2
    with wrapped(model, output_dims={"aux_loss": None}) as other:
        result, expected = (each(ids, output_router_logits=True) for each in (other, model))
        assert other.statistics().engaged == 1
        assert_same(result.router_logits, expected.router_logits)
