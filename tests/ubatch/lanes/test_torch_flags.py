"""torch's flags of a thread: lanes see the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from lanes import lane_pool, run
from torch.autograd.graph import disable_saved_tensors_hooks

Surrounding = Callable[[], AbstractContextManager[Any]]


def flushing() -> bool:
    return (torch.tensor([1e-40]) * 1.0).item() == 0.0


@contextmanager
def set_to(set_: Callable[[bool], object], value: bool) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(not value)


FLAGS: dict[str, tuple[Surrounding, Callable[[], Any]]] = {
    "backward's threads": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch._C._is_multithreading_enabled(),
    ),
    "denormals": (lambda: set_to(torch.set_flush_denormal, True), flushing),
    "replay of views": (
        lambda: torch.autograd.grad_mode._force_original_view_tracking(True),
        lambda: torch._C._is_view_replay_enabled(),
    ),
    "forbidden hooks": (
        lambda: disable_saved_tensors_hooks("not here"),
        lambda: torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_lanes_see_the_flags_of_the_caller(name: str) -> None:
    surrounding, look = FLAGS[name]
    with lane_pool() as pool:
        outside = look()
        assert run(pool, look, look) == [outside] * 2, "their threads have started before"
        with surrounding():
            inside = look()
            assert inside != outside
            assert run(pool, look, look) == [inside] * 2
        assert run(pool, look, look) == [outside] * 2


def test_dtensors_see_the_flag_of_the_caller() -> None:
    experimental = pytest.importorskip(
        "torch.distributed.tensor.experimental", reason="this torch was built without distributed tensors"
    )
    from torch.distributed.tensor import DTensor

    def look() -> bool:
        return bool(DTensor._op_dispatcher._allow_implicit_replication)

    with lane_pool() as pool:
        with experimental.implicit_replication():
            assert run(pool, look, look) == [True, True]
        assert run(pool, look, look) == [False, False]
