"""Parts of one operation on several cores: each with one compute thread, in the caller's modes, all over at the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from moe import cpu_threads, make_experts
from moe.cpu_threads import compute_threads, run_parts
from moe.experts import packed


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two compute threads in this one, whatever the machine has."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_threads, "_cores", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    cpu_threads._pool().shutdown()
    cpu_threads._pool.cache_clear()


def test_parts_run_at_the_same_time_with_one_compute_thread_each() -> None:
    both = threading.Barrier(2, timeout=30)
    seen: list[tuple[str, int]] = []

    def part() -> None:
        both.wait()
        seen.append((threading.current_thread().name.partition("_")[0], torch.get_num_threads()))

    assert compute_threads() == 2
    for _ in range(2):
        run_parts([part, part])
    assert sorted(seen) == [("MainThread", 1)] * 2 + [("ubatch-compute", 1)] * 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("inference", [False, True])
def test_parts_see_the_callers_modes(inference: bool) -> None:
    made: list[Tensor | None] = [None, None]

    def part(place: int) -> None:
        made[place] = torch.ones(2) * 2

    with torch.inference_mode(inference), torch.no_grad():
        run_parts([partial(part, place) for place in (0, 1)])
    assert [x is not None and x.is_inference() for x in made] == [inference, inference]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_when_all_parts_are_over(failing: int) -> None:
    over = []

    def part(place: int) -> None:
        if place == failing:
            raise ValueError("a part")
        time.sleep(0.2)
        over.append(place)

    with pytest.raises(ValueError, match="a part"):
        run_parts([partial(part, place) for place in (0, 1)])
    assert over == [1 - failing]
    assert torch.get_num_threads() == 2


def test_one_thread_where_torch_has_one_or_openmp_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    assert compute_threads() == 1
    torch.set_num_threads(3)
    assert compute_threads() == 2  # cores
    monkeypatch.setattr(cpu_threads, "_openmp", lambda: None)
    assert compute_threads() == 1
    run_parts([lambda: None])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork processes")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    run_parts([lambda: None, lambda: None])
    child = os.fork()
    if not child:
        seen: list[int] = []
        run_parts([lambda: seen.append(0), lambda: seen.append(1)])
        os._exit(0 if sorted(seen) == [0, 1] else 1)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.parametrize("cached_bytes", [0, 1 << 20])
@torch.inference_mode()
def test_experts_are_shared_among_cores(cached_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, bit by bit, as in one thread; and both threads have computed."""
    monkeypatch.setattr(packed, "_CACHED_BYTES", cached_bytes)
    experts = make_experts("packed", torch.randn(8, 12, 8), torch.randn(8, 8, 6))
    ids = torch.tensor([[0, 3]] * 21 + [[7, 2]] * 19 + [[5, 6]])
    x, weights = torch.randn(41, 8), torch.rand(41, 2)
    torch.set_num_threads(1)
    expected = experts(x, ids, weights)
    torch.set_num_threads(2)
    names = set()
    run_share = packed.PackedExperts._run_share

    def watched(*args: object) -> None:
        names.add(threading.current_thread().name.partition("_")[0])
        run_share(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(packed.PackedExperts, "_run_share", watched)
    assert torch.equal(experts(x, ids, weights), expected)
    assert names == {"MainThread", "ubatch-compute"}


def test_shares_take_about_as_long() -> None:
    for rows in ([5] * 32, [100, 1, 1, 1, 1, 1], [1, 1, 1, 1, 100], [3], [3, 3], [9] * 4):
        experts = list(enumerate(rows))
        for most in (1, 2, 3, 16):
            shares = list(packed._cut(experts, most))
            assert [each for share in shares for each in share] == experts
            assert 1 <= len(shares) <= min(most, max(1, len(rows) // 2))
    halves = list(packed._cut(list(enumerate([5] * 32)), 2))
    assert [len(share) for share in halves] == [16, 16]
