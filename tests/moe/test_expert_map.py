"""From experts to slots, and the experts' load: the kernels against torch, in place, in every kind of step."""

from __future__ import annotations

import pytest
import torch
from c_kernels import needs_c
from hypothesis import example, given, settings
from hypothesis import strategies as st
from placements import random_placement
from torch import Tensor
from triton_batches import DEVICE

from moe import ExpertLoads, ExpertMap
from moe import expert_map as module
from moe.expert_map import map_and_count, reference_map_and_count
from moe.kernels import expert_map as triton_kernel
from moe.placement import MOST_ROWS
from ubatch import ForwardContext, ForwardMode, set_forward_context
from ubatch.kernels import Recording, why_not_c

KERNELS = [pytest.param("c", marks=needs_c), pytest.param("triton", marks=pytest.mark.triton), "torch"]


def run(kernel: str, ids: Tensor, experts: int, expert_map: ExpertMap | None, counts: Tensor | None) -> Tensor:
    """One of the kernels; its counts are on the CPU afterwards."""
    if kernel == "c":
        return map_and_count(ids, expert_map, None if counts is None else (counts, torch.zeros_like(counts)))
    mapping = None if expert_map is None else (expert_map.table, expert_map.turns)
    if kernel == "torch":
        return reference_map_and_count(ids, experts, mapping, counts)
    there = None if counts is None else counts.to(DEVICE)
    moved = None if mapping is None else (mapping[0].to(DEVICE), mapping[1].to(DEVICE))
    slots = triton_kernel.map_and_count(ids.to(DEVICE), experts, moved, there).cpu()
    if counts is not None and there is not None:
        counts.copy_(there)
    return slots


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15)
@given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 9),
    redundant=st.integers(0, 6),
    mapped=st.booleans(),
    counted=st.booleans(),
    seed=st.integers(0, 99),
)
@example(tokens=300, experts=3, redundant=5, mapped=True, counted=True, seed=1)
def test_slots_and_counts(
    kernel: str, tokens: int, experts: int, redundant: int, mapped: bool, counted: bool, seed: int
) -> None:
    placement, rank = random_placement(1, experts, 3, redundant, seed), seed % 3
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, 2), generator=generator)  # some are no expert's
    counts = torch.arange(experts) if counted else None
    table = placement.dispatch_table(0, rank)
    slots = run(kernel, ids, experts, ExpertMap(table) if mapped else None, counts)
    assert slots.dtype == torch.int64
    assert slots.shape == ids.shape
    expected = [
        [table[token % len(table), e] if 0 <= e < experts else -1 for e in row] for token, row in enumerate(ids)
    ]
    assert slots.tolist() == (expected if mapped else ids.tolist())
    if counts is not None:
        assert counts.tolist() == [expert + int((ids == expert).sum()) for expert in range(experts)]


def test_a_table_is_replaced_in_place() -> None:
    first, then = random_placement(1, 4, 2, 0, 1), random_placement(1, 4, 2, 4, 2)
    expert_map = ExpertMap(first.dispatch_table(0, 0))
    addresses = expert_map.table.data_ptr(), expert_map.turns.data_ptr()
    ids = torch.arange(4).repeat(12, 1)
    for placement in (then, first):
        table = placement.dispatch_table(0, 0)
        expert_map.replace(table)
        assert map_and_count(ids, expert_map, None).tolist() == [table[t % len(table), :4].tolist() for t in range(12)]
    assert (expert_map.table.data_ptr(), expert_map.turns.data_ptr()) == addresses
    assert expert_map.table.shape == (MOST_ROWS, 5)


def test_without_a_map_ids_are_passed_on() -> None:
    ids = torch.tensor([[0, 1]])
    assert map_and_count(ids, None, None) is ids
    assert map_and_count(ids, None, ExpertLoads(1, 2).of_layer(0)) is ids


@pytest.mark.parametrize("mode", ForwardMode)
def test_the_load_of_prefill_and_decode_steps_is_apart(mode: ForwardMode) -> None:
    loads = ExpertLoads(2, 3)
    with set_forward_context(ForwardContext(mode=mode)):
        map_and_count(torch.tensor([[0, 2], [2, -1]]), None, loads.of_layer(1))
    decode = mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    expected = torch.zeros(2, 2, 3, dtype=torch.int64)
    expected[int(decode), 1] = torch.tensor([1, 0, 2])
    before = loads.snapshot()
    assert torch.equal(before, expected)
    loads.clear()
    assert not loads.counts.any()
    assert torch.equal(before, expected), "a snapshot is a copy"


@needs_c
def test_a_recorded_call_counts_again_and_reads_the_table_of_its_time() -> None:
    assert why_not_c() is None
    placement, other, loads = random_placement(1, 4, 2, 2, 1), random_placement(1, 4, 2, 2, 5), ExpertLoads(1, 4)
    expert_map = ExpertMap(placement.dispatch_table(0, 1))
    ids = torch.tensor([[0, 3], [1, 2]])
    with Recording() as recording:
        slots = map_and_count(ids, expert_map, loads.of_layer(0))
    assert recording.refused is None
    expert_map.replace(other.dispatch_table(0, 1))
    for call in recording.calls:
        call.function(*call.arguments)
    assert loads.counts[0, 0].tolist() == [2] * 4
    assert torch.equal(slots, map_and_count(ids, expert_map, None))


@needs_c
def test_torch_maps_and_counts_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(module, "_kernel", lambda: pytest.fail("C was called"))
    loads = ExpertLoads(1, 4)
    with Watches():
        map_and_count(torch.tensor([[0, 3]]), None, loads.of_layer(0))
    assert loads.counts[0, 0].tolist() == [1, 0, 0, 1]
