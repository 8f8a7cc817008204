"""Hugging Face's `generate` through the wrapper: the same tokens as the untouched model, with its own cache."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_families import CASES, assert_held, call, held, model_of, prompts
from torch import Tensor
from transformers import DynamicCache
from wrapping import assert_same, wrapped
from zoo_entry import SIZES, pretrained

from ubatch import DeclineReason, Point, UBatchWrapper, dbo_current_ubatch_id, dbo_yield, interleave, tracing

pytestmark = pytest.mark.long

ROWS, LENGTH, NEW = 6, 7, 8


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers, random, far from uniform logits; lanes hand on around every MoE block."""
    torch.manual_seed(0)
    made = pretrained("Qwen3MoeForCausalLM", **SIZES.moe, head_dim=4)()
    for layer in made.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: dbo_yield(Point.DISPATCH))
        layer.mlp.register_forward_hook(lambda module, args, output: dbo_yield(Point.COMBINE))
    return made


@pytest.fixture
def wrapper(model: Any) -> Iterator[UBatchWrapper]:
    with wrapped(model) as made:
        yield made


def ids(rows: int = ROWS) -> Tensor:
    return prompts(rows, LENGTH)


def left_padded() -> dict[str, Tensor]:
    given, mask = ids(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, padding in enumerate((0, 3, 0, 6, 1, 0)):
        given[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": given, "attention_mask": mask}


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
def test_the_tokens_are_the_untouched_models(model: Any, way: str, padded: bool, lanes: int) -> None:
    inputs = left_padded() if padded else {"input_ids": ids()}
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


def test_prefill_and_decode_steps_have_thresholds_of_their_own(model: Any) -> None:
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
def test_a_cache_is_filled_in_place_step_by_step(model: Any, wrapper: UBatchWrapper, lazy: bool) -> None:
    """With layers from the start or made as they are met, over chunks and single tokens."""
    make = DynamicCache if lazy else lambda: DynamicCache(config=model.config)
    ours, plain = make(), make()
    for chunk in ids().split([3, 2, 1, 1], 1):
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


def test_a_cache_that_the_model_makes_is_merged(model: Any, wrapper: UBatchWrapper) -> None:
    result, expected = wrapper(ids()), model(ids())
    assert wrapper.statistics().engaged == 1
    assert_caches_equal(result.past_key_values, expected.past_key_values)
    as_tuple = wrapper(ids(), return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], expected.logits)
    assert_caches_equal(as_tuple[1], expected.past_key_values)


def test_generation_goes_on_from_a_cache(model: Any, wrapper: UBatchWrapper) -> None:
    expected = generate(model, left_padded(), max_new_tokens=2 * NEW)
    cache = DynamicCache(config=model.config)
    first = generate(wrapper, left_padded(), past_key_values=cache)
    assert cache.get_seq_length() == LENGTH + NEW - 1
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(ROWS, NEW, dtype=torch.long)], 1)
    second = generate(wrapper, {"input_ids": first, "attention_mask": mask}, past_key_values=cache)
    assert torch.equal(second, expected)
    assert wrapper.statistics().declined == {}


def test_other_outputs(model: Any) -> None:
    """A loss has no dimensions; router logits have one row per token."""
    given = ids()
    with wrapped(model, verify="first") as wrapper:
        for others in ({"labels": given}, {"output_router_logits": True}):
            for _ in range(2):
                expected = model(given, use_cache=False, **others)
                assert_same(wrapper(given, use_cache=False, **others), expected)
        assert wrapper.statistics().declined == {DeclineReason.ZERO_DIM_OUTPUT: 4}
        expected = model(given)
        for keep, columns in ((1, [-1]), (torch.tensor([0, 2]), [0, 2])):
            for _ in range(2):
                kept = wrapper(given, logits_to_keep=keep)
                torch.testing.assert_close(kept.logits, expected.logits[:, columns])
        assert wrapper.statistics().engaged == 2
    with wrapped(model, output_dims={"aux_loss": None}) as other:
        result, expected = (each(given, output_router_logits=True) for each in (other, model))
        assert other.statistics().engaged == 1
        assert_same(result.router_logits, expected.router_logits)


# ---------------------------------------------------------------------------------------------- other models and caches

HYBRID = ["lfm2", "jamba", "qwen3_next", "mamba", "mamba2", "falcon_mamba", "bamba", "falcon_h1", "zamba2", "minimax"]
OTHERS = ["gemma3", "deepseek_v4", "glm_moe_dsa", "t5", "bart"]
QUICK = ["lfm2", "mamba2", "qwen3_next", "gemma3", "t5"]
STATIC = {"cache_implementation": "static"}
SPLIT_DIMS = {"decoder_input_ids": 0, "decoder_attention_mask": 0, "encoder_outputs": 0}


def settings(model: Any) -> dict[str, Any]:
    return {"split_dims": SPLIT_DIMS} if model.config.is_encoder_decoder else {}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["greedy", "sampled", "beams"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in [*HYBRID, *OTHERS]]
)
def test_the_tokens_of_other_models(name: str, way: str) -> None:
    model = model_of(name)
    expected = generate(model, {"input_ids": prompts()}, **WAYS[way])
    assert len(expected.unique()) > 2, "all rows say the same"
    with wrapped(model, **settings(model)) as wrapper:
        assert torch.equal(generate(wrapper, {"input_ids": prompts()}, **WAYS[way]), expected)
        seen = wrapper.statistics()
    assert (seen.engaged, dict(seen.declined)) == (NEW, {})


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "falcon_h1", "glm_moe_dsa"])
def test_static_caches(name: str) -> None:
    model = model_of(name)
    with wrapped(model, split_dims={"attention_mask": 0}) as wrapper:  # one mask per kind of layer, `[B, 1, S, length]`
        assert torch.equal(*(generate(each, {"input_ids": prompts()}, **STATIC) for each in (wrapper, model)))
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
