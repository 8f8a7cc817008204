"""`UBATCH_CHECK_ORDER=1`: launches in different orders raise an error on all ranks that shows the difference."""

import os

import pytest
import torch
from lanes import EVERY_POINT
from torch import Tensor, nn

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, LaunchOrderError, UBatchError, UBatchWrapper, dbo_current_ubatch_id, dbo_enabled
from ubatch.ranks.launch_order import VARIABLE, LaunchOrder, check_ballots, first_difference


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank."""
    monkeypatch.setenv(VARIABLE, "1")


def test_rows_may_differ_in_number_but_not_in_kind() -> None:
    orders = [LaunchOrder(), LaunchOrder(), LaunchOrder()]
    for order, x in zip(orders, (torch.ones(3, 8), torch.ones(0, 8), torch.ones(3, 4)), strict=True):
        order.note(0, "dispatch", x)
    assert orders[0].launches == ["lane 0: dispatch float32 [*, 8]"]
    assert orders[0].ballot() == orders[1].ballot() != orders[2].ballot()
    assert check_ballots([orders[0].ballot(), orders[1].ballot()])
    assert not check_ballots([orders[0].ballot(), orders[2].ballot()])
    assert check_ballots([[0, 0, 0], [0, 0, 0]])
    with pytest.raises(LaunchOrderError, match=r"is set on ranks \[1\] of the group only"):
        check_ballots([[0, 0, 0], orders[0].ballot()])


def test_the_first_difference_is_told() -> None:
    told = first_difference({0: ["a", "b", "c", "d", "e", "f"], 3: ["a", "b", "x"]})
    assert told.splitlines() == [
        "the ranks launched in different orders; the first 2 launches are the same, then:",
        "  rank 0 (6 launches): c; d; e",
        "  rank 3 (3 launches): x",
    ]
    assert first_difference({0: ["a"], 1: ["a"]}) is None
    assert "rank 1 (0 launches): nothing" in str(first_difference({0: ["a"], 1: []}))
    assert first_difference({0: ["a"], 1: []}, ended=False) is None, "rank 1 was stopped before it came there"
    assert first_difference({0: ["a", "b"], 1: ["c"]}, ended=False) is not None


class Model(nn.Module):
    """Adds up over the ranks, twice; in lane 0 of a rank it passes a point more, or does nothing, if told to."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.strays = self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        if self.strays and dbo_enabled() and dbo_current_ubatch_id() == 0:
            ubatch.dbo_yield("a point that depends on data")
        if self.skips and dbo_enabled() and dbo_current_ubatch_id() == 0:
            return x
        for _ in range(2):
            x = ubatch.all_reduce(x, self.group)
        return x


def _wrapped(group: CommGroup) -> tuple[Model, UBatchWrapper]:
    model = Model(group)
    config = ubatch.UBatchConfig(verify="off", group=group, schedule=EVERY_POINT, dbo_prefill_token_threshold=2)
    return model, UBatchWrapper(model, config)


@on_ranks(2, timeout_s=10.0)
def test_ranks_that_launch_alike(rank: int, group: CommGroup) -> None:
    _, wrapper = _wrapped(group)
    for step in range(3):
        rows = 4 + 2 * step
        torch.testing.assert_close(wrapper(torch.ones(rows, 3)), torch.full((rows, 3), 4.0))
    assert wrapper.statistics().engaged == 3
    launches = group.usable_connection().order.launches
    assert launches == [f"lane {lane}: all_reduce float32 [*, 3]" for lane in (0, 1, 0, 1)]


@on_ranks(2, timeout_s=10.0)
def test_a_lane_that_strays(rank: int, group: CommGroup) -> None:
    """Rank 1's lane 1 launches first. What each lane adds up is as large, so nobody notices but the next vote."""
    model, wrapper = _wrapped(group)
    x = torch.arange(4.0)[:, None] * torch.ones(4, 3)
    wrapper(x)
    model.strays = rank == 1
    wrong = wrapper(x)
    assert not torch.equal(wrong, 4 * x), "rows of different lanes were added"
    with pytest.raises(LaunchOrderError) as caught:
        wrapper(x)
    lines = str(caught.value).splitlines()
    assert "the first 0 launches are the same" in lines[0]
    assert "rank 0 (4 launches): lane 0: all_reduce float32 [*, 3]; lane 1" in lines[1]
    assert "rank 1 (4 launches): lane 1: all_reduce float32 [*, 3]; lane 0" in lines[2]
    with pytest.raises(UBatchError, match=r"reset\(\)"):
        wrapper(x)
    group.reset()
    model.strays = False
    torch.testing.assert_close(wrapper(x), 4 * x)


@pytest.mark.wide
@on_ranks(2, timeout_s=2.0)
def test_a_lane_that_launches_nothing(rank: int, group: CommGroup) -> None:
    """Rank 1's lane 0 launches nothing: the other rank waits for it, and then says why."""
    model, wrapper = _wrapped(group)
    model.skips = rank == 1

    def run_twice() -> None:
        for _ in range(2):
            wrapper(torch.ones(4, 3))

    with pytest.raises(UBatchError) as caught:
        run_twice()
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "the first 0 launches are the same, then:" in told
    assert "rank 1 (2 launches): lane 1: all_reduce float32 [*, 3]; lane 1" in told


@on_ranks(2, timeout_s=10.0)
def test_a_check_on_one_rank_only(rank: int, group: CommGroup) -> None:
    """Every rank says so."""
    if rank == 1:
        del os.environ[VARIABLE]
    _, wrapper = _wrapped(CommGroup.from_process_group(timeout_s=10.0))
    with pytest.raises(LaunchOrderError, match=r"is set on ranks \[0\] of the group only"):
        wrapper(torch.ones(4, 3))
