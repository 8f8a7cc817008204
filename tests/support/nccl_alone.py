"""NCCL with a group of one: what one GPU, or a CUDA that computes nothing, can run of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import free_port
from ubatch import (
    CommGroup,
    GroupBroken,
    all_gather,
    all_reduce,
    all_to_all_single,
    launch_all_to_all_single,
    reduce_scatter,
)


@contextmanager
def nccl_alone() -> Iterator[CommGroup]:
    """A group of this process, in inference mode; it ends with the block."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, device_id=device
    )
    try:
        with torch.inference_mode():
            yield CommGroup.from_process_group(timeout_s=20.0)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()


class Collectives(nn.Module):
    """Each of them, in `layers` layers. `[rows, size]` to the same."""

    def __init__(self, group: CommGroup, layers: int = 1) -> None:
        super().__init__()
        self.group, self.layers = group, layers

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        for _ in range(self.layers):
            x = all_reduce(x.sin(), group)
            x = reduce_scatter(all_gather(x.cos(), group), group)
            x = all_to_all_single(x * 2, group)
        return x


def check_reset(group: CommGroup) -> None:
    """With a communicator that was aborted the group is refused until it is reset; then a new one serves it."""
    connection = group.usable_connection()
    launch_all_to_all_single(torch.ones(4, 1, device="cuda"), group)
    connection.pg.abort()
    connection.fail("the test says so.")
    with pytest.raises(GroupBroken, match="the test says so"):
        all_reduce(torch.ones(3, device="cuda"), group)
    group.reset()
    rows = torch.arange(3.0)
    assert all_reduce(rows.cuda(), group).tolist() == rows.tolist()
