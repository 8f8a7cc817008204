"""NCCL with a group of one: what one GPU, or a CUDA that computes nothing, can run of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ranks import free_port
from ubatch import CommGroup


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
