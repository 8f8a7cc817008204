"""On a GPU: refuse what makes the host wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_waits() -> Iterator[None]:
    """An operation of torch that makes the host wait for the device fails."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch says that it misses some waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
