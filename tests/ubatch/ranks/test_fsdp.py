"""Modules whose weights torch gathers layer by layer (`fully_shard`): lanes share what is gathered."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ranks import on_ranks
from ubatch import CommGroup, UBatchConfig, UBatchWrapper, UnvotedCollectiveError, dbo_current_ubatch_id, tracing
from ubatch import all_reduce as overlapped_all_reduce
from ubatch.ranks.fsdp import sharing_weights

HIDDEN, LAYERS = 8, 3


_failing: list[bool] = []
"""Whether lanes fail. An attribute of the module would be seen to change, and all proved anew."""


class Layer(nn.Module):
    """Uses its weights on both sides of a point, where the other lanes come and go."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        summed = overlapped_all_reduce(self.up(x), self.group)
        if _failing and dbo_current_ubatch_id() == 1:
            raise ValueError("lane 1 fails")
        return x + self.down(torch.relu(summed))


def layers(group: CommGroup) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(group) for _ in range(LAYERS))).eval()


def sharded(group: CommGroup) -> nn.Sequential:
    model = layers(group)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def is_freed(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for layer in model for parameter in layer.parameters())


def counted_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    gathers: list[int] = []
    gather = _fsdp_param_group.foreach_all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers.append(dbo_current_ubatch_id())
        return gather(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
    return gathers


@pytest.mark.parametrize(
    ("lanes", "schedule"), [(2, "mlp_shared_overlap"), (3, "mlp_shared_overlap"), (2, "two_batch_decode")]
)
@on_ranks(2)
@torch.no_grad()
def test_lanes_share_what_is_gathered(rank: int, group: CommGroup, lanes: int, schedule: str) -> None:
    model, x = sharded(group), torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(rank))
    expected = layers(group)(x)
    torch.testing.assert_close(model(x), expected)
    config = UBatchConfig(group=group, num_ubatches=lanes, schedule=schedule, dbo_prefill_token_threshold=lanes)
    wrapper = UBatchWrapper(model, config)
    torch.testing.assert_close(wrapper(x), expected)
    with pytest.MonkeyPatch.context() as monkeypatch, tracing() as trace:
        gathers = counted_gathers(monkeypatch)
        result = wrapper(x)
    torch.testing.assert_close(result, expected)
    assert {lane for lane, _ in trace.order} == set(range(lanes))
    assert is_freed(model), "the last lane that left has freed the weights"
    if schedule == "mlp_shared_overlap":
        assert gathers == [0] * LAYERS, "the lanes behind find them gathered"
    _failing.append(True)  # a lane that fails leaves its peers' weights where the next call finds them
    with pytest.raises(ValueError, match="lane 1 fails"):
        wrapper(x)
    _failing.clear()
    group.reset()
    for _ in range(2):
        torch.testing.assert_close(wrapper(x), expected)
    assert is_freed(model)


@on_ranks(2)
@torch.no_grad()
def test_gathering_over_ranks_that_did_not_vote_is_refused(rank: int, group: CommGroup) -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, HIDDEN))
    model.reshard()
    wrapper = UBatchWrapper(model, UBatchConfig(verify="off", dbo_prefill_token_threshold=2))
    with pytest.raises(UnvotedCollectiveError, match=r"gather of weights over ranks \[0, 1\] in lane 0"):
        wrapper(torch.ones(4, HIDDEN))


def test_outside_of_the_block_torch_is_as_it_was() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    before = FSDPParamGroup.pre_forward, FSDPParamGroup.post_forward
    with sharing_weights(), sharing_weights():
        assert FSDPParamGroup.post_forward is not before[1]
    assert (FSDPParamGroup.pre_forward, FSDPParamGroup.post_forward) == before
