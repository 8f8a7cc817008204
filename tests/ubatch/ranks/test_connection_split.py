"""A group has its own communicator: ranks outside the group take no part in making it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ubatch import CommGroup

BOUND = torch.device("cuda:0")


@pytest.fixture
def job() -> Iterator[dist.ProcessGroup]:
    """A job of one rank, bound to a device as NCCL's are that are made with `device_id`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default = c10d._get_default_group()
    default.bound_device_id = BOUND
    try:
        yield default
    finally:
        default.bound_device_id = None
        dist.destroy_process_group()


def test_a_group_is_not_split_off_a_job_that_is_bound_to_a_device(
    job: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    split: list[dist.ProcessGroup] = []
    monkeypatch.setattr(c10d, "_get_split_source", split.append)
    group = CommGroup.from_process_group(timeout_s=5.0)
    assert split == [], "NCCL would wait for every rank of the job"
    assert group.usable_connection().pg.bound_device_id is None
    assert job.bound_device_id == BOUND, "the job's own is as it was"
