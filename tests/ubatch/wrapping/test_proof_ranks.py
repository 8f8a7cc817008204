"""Ranks prove together or not at all; a failure on one rank makes all decline, within that call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import seen

import ubatch
from ranks import run_ranks
from ubatch import CommGroup, DeclineReason, UBatchConfig, UBatchWrapper, dbo_enabled

pytestmark = pytest.mark.ranks

PEER = DeclineReason.PEER_DECLINED


class Summing(nn.Module):
    """Adds up over the ranks what every row is; `change` may spoil it."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.change = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        ones = ubatch.all_reduce(torch.ones(1), self.group)
        x = self.change(x * ones)
        return x + ubatch.all_reduce(torch.ones(1), self.group)


def proving(rank: int, world_size: int) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=20.0)
    config = UBatchConfig(group=group, dbo_prefill_token_threshold=2)
    model = Summing(group)
    found: dict[str, Any] = {}
    sizes = (8, 5)

    def call(name: str, *rows: tuple[int, int]) -> None:
        wrapper = UBatchWrapper(model, config)
        for of_ranks in rows:
            x = torch.randn(of_ranks[rank], 3)
            torch.testing.assert_close(wrapper(x), x * world_size + world_size)
        found[name] = seen(wrapper)

    with torch.inference_mode():
        call("alike", sizes, sizes, sizes)
        # A rank that was idle in the proof is unproved when it gets rows: all prove again.
        call("idle", (8, 0), (8, 0), (8, 5), (8, 5), (0, 5))

        def alone(x: Tensor) -> Tensor:
            return x - x.mean(0) if rank == 1 else x

        def raising(x: Tensor) -> Tensor:
            if rank == 1 and dbo_enabled():
                raise ValueError("not in a lane")
            return x

        def drawing(x: Tensor) -> Tensor:
            return x + 0 * torch.rand(1) if rank == 1 else x

        for change in (alone, raising, drawing):
            model.change = change
            wrapper = UBatchWrapper(model, config)
            for _ in range(4):
                x = torch.randn(sizes[rank], 3)
                torch.testing.assert_close(wrapper(x), model(x))
            assert group.broken is None
            found[change.__name__] = seen(wrapper)
        model.change = lambda x: x
        call("and the group is as good as new", sizes, sizes)
    return found


def test_ranks_prove_together() -> None:
    first, second = run_ranks(proving, 2)
    both = {"alike": (2, 1, {}), "idle": (3, 2, {}), "and the group is as good as new": (1, 1, {})}
    reason = DeclineReason
    why = {"alone": reason.ROWS_DEPEND, "raising": reason.LANE_FAILED, "drawing": reason.DRAWS_RANDOM}
    assert first == {**both, **{name: (0, 0, {PEER: 4}) for name in why}}
    assert second == {**both, **{name: (0, 0, {own: 4}) for name, own in why.items()}}


def several_groups(rank: int, world_size: int) -> tuple[int, int, dict[Any, int]]:
    """A module whose collectives go over a group of its own: both are made usable again."""
    voting, data = (CommGroup.from_process_group(timeout_s=20.0) for _ in range(2))
    model = Summing(data)
    wrapper = UBatchWrapper(model, UBatchConfig(group=voting, dbo_prefill_token_threshold=2))

    def raising(x: Tensor) -> Tensor:
        if rank == 0 and dbo_enabled():
            raise ValueError("not in a lane")
        return x

    model.change = raising
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(6, 3)
            torch.testing.assert_close(wrapper(x), x * world_size + world_size)
    assert [group.broken for group in (voting, data)] == [None, None]
    return seen(wrapper)


def test_every_group_of_the_step_is_reset() -> None:
    assert run_ranks(several_groups, 2) == [(0, 0, {DeclineReason.LANE_FAILED: 3}), (0, 0, {PEER: 3})]


def required(rank: int, world_size: int) -> list[str]:
    """`require_overlap` allows a proving call, and refuses one whose proof has failed on any rank."""
    group = CommGroup.from_process_group(timeout_s=20.0)
    config = UBatchConfig(group=group, dbo_prefill_token_threshold=2, require_overlap=True)
    wrapper = UBatchWrapper(Summing(group), config)
    x = torch.randn(6, 3)
    with torch.inference_mode():
        wrapper(x)
        wrapper(x)
        assert seen(wrapper) == (1, 1, {})
        wrapper.change = (lambda x: x.cumsum(0)) if rank else (lambda x: x)
        with pytest.raises(ubatch.OverlapDeclined) as declined:
            wrapper(x)
    assert group.broken is None
    return [declined.value.reason]


def test_overlap_that_is_required() -> None:
    assert run_ranks(required, 2) == [[PEER], [DeclineReason.ROWS_DEPEND]]


def late(rank: int, world_size: int) -> list[Any]:
    """Lanes that change the module, unlike in the proof: on all ranks the call runs whole; on one it is an error."""
    group = CommGroup.from_process_group(timeout_s=20.0)
    model, changing = Summing(group), list[int]()
    model.count = 0

    def counting(x: Tensor) -> Tensor:
        if rank in changing:
            model.count += 1
        return x

    model.change = counting
    wrapper = UBatchWrapper(model, UBatchConfig(group=group, dbo_prefill_token_threshold=2))
    x = torch.randn((8, 5)[rank], 3)
    with torch.inference_mode():
        for _ in range(2):
            wrapper(x)
        changing += [0, 1]
        torch.testing.assert_close(wrapper(x), x * world_size + world_size)
        found = [seen(wrapper), model.count]
        changing.clear()
        wrapper.module_is = "another"  # through the wrapper: all is proved anew
        for _ in range(2):
            wrapper(x)
        changing.append(0)
        if rank == 1:
            wrapper(x)  # which notices at its next step
        with pytest.raises(ubatch.UBatchError) as error:
            wrapper(x)
        group.reset()
        changing.clear()
        torch.testing.assert_close(wrapper(x), x * world_size + world_size)
    return [*found, model.count, str(error.value)]


def test_what_lanes_change_late_on_ranks() -> None:
    first, second = run_ranks(late, 2)
    for counts, once, after, message in (first, second):
        assert (counts, once, after) == ((1, 1, {DeclineReason.MODULE_KEEPS_STATE: 1}), 1, 1)
        assert "ranks [0]" in message
        assert "unlike in their proof (module_keeps_state)" in message
