"""Every cache class of transformers: split, run through a step of its model in parts, and merged."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cache_families import CASES, ROWS, assert_held, call, held, model_of, prompts
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache
from transformers.cache_utils import DynamicLayer
from transformers.models.reformer.modeling_reformer import ReformerDynamicCache
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrDynamicReferenceSlidingWindowLayer
from wrapping import wrapped

from ubatch import DeclineReason, SplitError
from ubatch.calls.caches import splitter_for

pytestmark = pytest.mark.long

CHUNKS = (3, 1, 1, 2, 1)
"""Tokens of the steps: into an empty cache, then single ones, and a few at once; sliding windows fill up on the way."""

BOUNDS = [slice(0, 3), slice(3, 5)]
SINGLES = [slice(row, row + 1) for row in range(ROWS)]


def filled(case: str, steps: int) -> Any:
    """The case's cache after a number of steps on the whole batch."""
    model, make = model_of(CASES[case][0]), CASES[case][1]
    cache = make(model)
    for ids in prompts(length=sum(CHUNKS)).split(CHUNKS, 1)[:steps]:
        call(model, ids, slice(None), cache)
    return cache


def memory(cache: Any) -> set[int]:
    tensors = [value for value in held(cache).values() if isinstance(value, Tensor) and value.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def objects(value: Any) -> list[int]:
    """The containers and layers that a cache is made of, but not its tensors."""
    if isinstance(value, dict):
        return [id(value), *(own for item in value.values() for own in objects(item))]
    if isinstance(value, list):
        return [id(value), *(own for item in value for own in objects(item))]
    return [id(value), *objects(vars(value))] if type(value).__module__.startswith("transformers.") else []


@pytest.mark.sample(7)
@pytest.mark.parametrize("bounds", [BOUNDS, [slice(0, 1), slice(1, 2), slice(2, 5)]])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_step_on_the_parts_is_a_step_on_the_whole(case: str, bounds: Sequence[slice]) -> None:
    """From an empty cache on: the logits, all that the cache then holds, and the memory that stays where it was."""
    model, make = model_of(CASES[case][0]), CASES[case][1]
    ours, plain = make(model), make(model)
    for ids in prompts(length=sum(CHUNKS)).split(CHUNKS, 1):
        held_before, plain_before, made_of = held(ours), held(plain), objects(ours)
        contents = copy.deepcopy(held_before)
        parts = splitter_for(ours).split(ours, bounds)
        results = [call(model, ids, rows, part) for rows, part in zip(bounds, parts, strict=True)]
        assert_held(held(ours), contents)
        assert splitter_for(ours).merge(parts, ours) is ours
        expected = call(model, ids, slice(None), plain)
        torch.testing.assert_close(torch.cat(results), expected, rtol=1e-4, atol=1e-4)
        after, plain_after = held(ours), held(plain)
        assert_held(after, plain_after, exact=False)
        for path, was in plain_before.items():
            if isinstance(was, Tensor) and plain_after[path] is was:
                assert after[path] is held_before[path], f"{path} is not where it was"
            if isinstance(was, Tensor):
                assert vars(after[path]) == vars(plain_after[path]), f"{path} has lost its marks"
        assert set(made_of) <= set(objects(ours))


@pytest.mark.sample(4)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_split_and_merge_change_nothing(case: str, steps: int) -> None:
    cache = filled(case, steps)
    before, contents = held(cache), copy.deepcopy(held(cache))
    for bounds in (BOUNDS, SINGLES, [slice(0, 0), slice(0, 5)], [slice(0, 5), slice(5, 5)]):
        assert splitter_for(cache).merge(splitter_for(cache).split(cache, bounds), cache) is cache
        assert_held(held(cache), contents)
        new = splitter_for(cache).merge(splitter_for(cache).split(cache, bounds), None)
        assert_held(held(new), contents)
    assert not (memory(new) & memory(cache))
    for path, was in before.items():
        assert not isinstance(was, Tensor) or was.shape == (0,) or held(cache)[path] is was, path


@pytest.mark.sample(4)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_rows_in_any_order_and_number(case: str, steps: int) -> None:
    """What the rows of single parts, copied and repeated, make: a cache of its own that a step can go on from."""
    cache = filled(case, steps)
    contents = copy.deepcopy(held(cache))
    order = [4, 0, 0, 2, 1, 4, 3]
    rows = [copy.deepcopy(part) for part in splitter_for(cache).split(cache, SINGLES)]
    made = splitter_for(cache).merge([rows[row] for row in order], None)
    assert not memory(made) & (memory(cache) | {address for row in rows for address in memory(row)})
    assert_held(held(cache), contents)
    for path, value in held(made).items():
        was = contents[path]
        if isinstance(was, Tensor) and was.shape != value.shape:
            dim = next(dim for dim in range(was.dim()) if was.shape[dim] != value.shape[dim])
            assert (was.shape[dim], value.shape[dim]) == (ROWS, len(order)), path
            assert torch.equal(value, was.index_select(dim, torch.tensor(order))), path
        elif isinstance(was, Tensor):
            assert was.shape in ((), (0,), (1,)), path
            assert torch.equal(value, was), path
        else:
            assert (was, value) == (ROWS, len(order)) if path.endswith(".batch_size") else was == value, path

    model = model_of(CASES[case][0])
    ids = prompts(length=1)
    if steps:
        expected = call(model, ids, slice(None), cache)[order]
        result = call(model, ids, order, made)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_idle_rank_has_a_cache_without_rows(case: str) -> None:
    whole = filled(case, 1)
    _, idle = splitter_for(whole).split(whole, [slice(0, ROWS), slice(ROWS, ROWS)])
    idle = copy.deepcopy(idle)
    contents = copy.deepcopy(held(idle))
    parts = splitter_for(idle).split(idle, [slice(0, 0), slice(0, 0)])
    assert_held(held(splitter_for(idle).merge(parts, idle)), contents)
    assert_held(held(splitter_for(idle).merge(parts, None)), contents)


# ------------------------------------------------------------------------------------------------- what is refused


class OwnLayer(DynamicLayer):
    """A class that may do anything."""


class OwnCache(DynamicCache):
    """With something beside its layers."""

    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.beside = beside


def with_layer(layer: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers.append(layer)
    return cache


def offloading() -> DynamicCache:
    """As on a GPU, where such a cache moves its layers."""
    cache = DynamicCache()
    cache.offloading = True
    return cache


REFUSED = {
    "OwnLayer": lambda: with_layer(OwnLayer()),
    "Fp8QuantizedLayer": lambda: QuantizedCache("fp8", model_of("llama").config),
    "offloads its layers": offloading,
    "its beside, a tensor of shape": lambda: OwnCache(torch.zeros(ROWS, 2)),
    "a function .its beside": lambda: OwnCache(lambda: None),
    r"a set .its beside\[0\]": lambda: OwnCache([set()]),
    "its layers.0..prefill_length may get": lambda: with_layer(UnlimitedOcrDynamicReferenceSlidingWindowLayer(4)),
    "its self_attention_cache.layers.0.": lambda: EncoderDecoderCache(with_layer(OwnLayer()), DynamicCache()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_known_is_refused_by_name(why: str) -> None:
    cache = REFUSED[why]()
    with pytest.raises(SplitError, match=why) as refused:
        splitter_for(cache).split(cache, BOUNDS)
    assert "register_splitter" in str(refused.value)


@torch.no_grad()
def test_it_is_refused_before_anything_ran() -> None:
    model, cache = model_of("llama"), QuantizedCache("fp8", model_of("llama").config)
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(1))
    try:
        with wrapped(model) as wrapper:
            call(wrapper, prompts(), slice(None), cache)
            assert wrapper.statistics().declined == {DeclineReason.NO_SPLITTER: 1}
            assert "Fp8QuantizedLayer" in str(wrapper.statistics().last_reason)
    finally:
        handle.remove()
    assert (calls, cache.get_seq_length()) == ([1], prompts().shape[1])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_cache_of_another_batch_is_refused(case: str) -> None:
    cache = filled(case, 1)
    with pytest.raises(SplitError, match="holds 5 sequences, but the call has 4 rows"):
        splitter_for(cache).split(cache, [slice(0, 2), slice(2, 4)])


@torch.no_grad()
def test_numbers_beside_the_layers_go_along_and_come_back() -> None:
    cache = OwnCache({"seen": [1, None, "a"], "more": ()})
    parts = splitter_for(cache).split(cache, BOUNDS)
    for part in parts:
        part.beside["seen"][0] = 2
        part.beside["new"] = torch.float32
    assert cache.beside == {"seen": [1, None, "a"], "more": ()}
    kept = cache.beside, cache.beside["seen"]
    splitter_for(cache).merge(parts, cache)
    assert cache.beside == {"seen": [2, None, "a"], "more": (), "new": torch.float32}
    assert cache.beside is kept[0]
    assert cache.beside["seen"] is kept[1]


def test_a_cache_without_layers() -> None:
    """Reformer's; layers without buckets put an empty tensor there."""
    cache, plain = ReformerDynamicCache(), ReformerDynamicCache()
    states, buckets = torch.randn(ROWS, 3, 8), torch.randint(9, (ROWS, 2, 6))
    for _ in range(2):
        parts = splitter_for(cache).split(cache, BOUNDS)
        for part, rows in zip(parts, BOUNDS, strict=True):
            part.update(buckets[rows], states[rows], 0)
            part.update(None, states[rows], 1)
        plain.update(buckets, states, 0)
        plain.update(None, states, 1)
        assert_held(held(splitter_for(cache).merge(parts, cache)), held(plain))


SPOIL: dict[str, Callable[[Any], object]] = {
    "number": lambda cache: setattr(cache.layers[3], "is_sliding", True),
    "shape": lambda cache: setattr(cache.layers[3], "keys", cache.layers[3].keys[:, :, 1:]),
    "class": lambda cache: setattr(cache.layers[3], "values", None),
    "dtype": lambda cache: setattr(cache.layers[3], "values", cache.layers[3].values.double()),
    "layers": lambda cache: cache.layers.pop(3),
}


@torch.no_grad()
@pytest.mark.parametrize("spoil", SPOIL)
def test_lanes_that_disagree_leave_the_cache_as_it_was(spoil: str) -> None:
    cache = filled("jamba", 2)
    contents = copy.deepcopy(held(cache))
    parts = splitter_for(cache).split(cache, BOUNDS)
    for lane, rows in enumerate(BOUNDS):
        call(model_of("jamba"), prompts(length=1), rows, parts[lane])
    SPOIL[spoil](parts[1])
    with pytest.raises(SplitError, match="lanes disagree on its layers"):
        splitter_for(cache).merge(parts, cache)
    assert_held(held(cache), contents)
