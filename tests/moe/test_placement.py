"""Placements of experts in slots: the default ones, their dispatch tables, and the loads that follow from them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.placement import IDLE, ExpertPlacement
from ubatch import ConfigError


@pytest.mark.parametrize(
    ("experts", "ranks", "held"),
    [(60, 8, [8] * 4 + [7] * 4), (7, 2, [4, 3]), (3, 2, [2, 1]), (4, 8, [1] * 4 + [0] * 4)],
)
def test_the_first_ranks_hold_one_more(experts: int, ranks: int, held: list[int]) -> None:
    placement = ExpertPlacement.default(2, experts, ranks)
    assert [len(placement.held(1, rank)) for rank in range(ranks)] == held
    assert np.concatenate([placement.held(1, rank) for rank in range(ranks)]).tolist() == list(range(experts))
    assert not (ExpertPlacement.default(2, experts, ranks, fill=True).experts == IDLE).any()


def test_only_a_placement_with_each_expert_in_its_own_slot_is_plain() -> None:
    assert ExpertPlacement.default(1, 6, 2).is_plain(0)
    assert not ExpertPlacement.default(1, 6, 2, redundant=2).is_plain(0)
    assert not ExpertPlacement(np.array([[1, 0, 2, 3]]), 4, 2).is_plain(0)


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    each = -(-(experts + draw(st.integers(0, 6))) // ranks)
    more = [draw(st.integers(0, experts - 1)) for _ in range(ranks * each - experts)]
    return ExpertPlacement(np.array([draw(st.permutations([*range(experts), *more]))]), experts, ranks)


@given(placements())
def test_tokens_take_turns_over_an_experts_replicas(placement: ExpertPlacement) -> None:
    """And rank loads are what the dispatch tables of all ranks say."""
    sent = np.zeros(placement.num_slots)
    for rank in range(placement.num_ranks):
        table = placement.dispatch_table(0, rank)
        assert (table[:, -1] == -1).all()
        for expert, column in enumerate(table.T[:-1]):
            assert (placement.experts[0, column] == expert).all()
            slots, times = np.unique(column, return_counts=True)
            assert len(slots) == min(placement.replicas[0, expert], len(table))
            assert times.max() - times.min() <= 1
            here = column // placement.slots_per_rank == rank
            assert here[0] or not here.any()
            sent += np.bincount(column, minlength=placement.num_slots) / len(table) / placement.num_ranks
    assert sent == pytest.approx(placement.slot_loads(np.ones((1, placement.num_experts)))[0], rel=0.05)
    ranks = placement.rank_loads(np.ones((1, placement.num_experts)))[0]
    assert ranks == pytest.approx(sent.reshape(placement.num_ranks, -1).sum(1), rel=0.05)


def test_balancedness_is_mean_by_max_and_perfect_without_tokens() -> None:
    placement = ExpertPlacement.default(2, 4, 2)
    loads = np.array([[[3, 3, 1, 1], [0, 0, 0, 0]], [[1, 1, 1, 1], [4, 0, 0, 0]]])
    assert placement.rank_loads(loads).tolist() == [[[6, 2], [0, 0]], [[2, 2], [4, 0]]]
    assert placement.balancedness(loads).tolist() == [[4 / 6, 1.0], [1.0, 0.5]]


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ([[0, 1, 2]], "equally many slots"),
        ([[0, 1, 2, 4]], "holds expert 4"),
        ([[0, 1, 2, -2]], "holds expert -2"),
        ([[0, 1, 2, 2]], "expert 3 of MoE layer 0 is in no slot"),
        ([[0, -1, 1, 2, 3, -1]], "idle slot is before"),
        ([], "equally many slots"),
    ],
)
def test_what_is_no_placement_is_refused(experts: list[list[int]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExpertPlacement(np.array(experts), 4, 2)


@given(placements(), st.sampled_from(["p.yaml", "p.json"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_saved_placement_is_loaded_as_it_was(tmp_path: Path, placement: ExpertPlacement, name: str) -> None:
    placement.save(tmp_path / name)
    assert ExpertPlacement.load(str(tmp_path / name)) == placement


@pytest.mark.wide
def test_large_placements_fit_a_file(tmp_path: Path) -> None:
    placement = ExpertPlacement.default(58, 256, 32, redundant=32)
    placement.save(tmp_path / "p.yaml")
    assert ExpertPlacement.load(tmp_path / "p.yaml") == placement


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.yaml", None, "No such file"),
        ("p.json", None, "No such file"),
        ("p.json", "{", "not valid JSON"),
        ("p.json", "[1]", "one JSON object, not list"),
        ("p.yaml", "- 1", "one mapping"),
        ("p.yaml", "", "num_experts is missing"),
        ("p.yaml", "num-expert: 2", "num_experts"),
        ("p.yaml", "num_experts: 2.0\nranks: 1\nlayers: [[0, 1]]", "num_experts must be a positive integer"),
        ("p.yaml", "num_experts: 2\nranks: true\nlayers: [[0, 1]]", "ranks must be a positive integer"),
        ("p.yaml", "num_experts: 2\nranks: 1\nlayers: 3", "layers must be a list"),
        ("p.yaml", "num_experts: 2\nranks: 1\nlayers: [[0, 1], 1]", "layer 1 must be a list of integers"),
        ("p.yaml", "num_experts: 2\nranks: 1\nlayers: [[0, yes]]", "layer 0 must be a list of integers"),
        ("p.yaml", "num_experts: 2\nranks: 1\nlayers: [[0, 1], [0]]", "layer 1 has 1 slots, but layer 0 has 2"),
        ("p.json", '{"num_experts": 2, "ranks": 1, "layers": [[0, 9999999999999999999]]}', "too large"),
        ("p.yaml", "num_experts: 99999999999\nranks: 1\nlayers: [[0, 1]]", "do not fit into 2 slots"),
        ("p.yaml", "num_experts: 2\nranks: 1\nlayers: [[0, 0]]", "p.yaml: expert 1 of MoE layer 0 is in no slot"),
    ],
)
def test_a_file_without_a_placement_is_refused(name: str, text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        ExpertPlacement.load(tmp_path / name)
