"""Host reads and event queries: no more than necessary, and none while a graph is captured."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from cuda_cases import Lanes, compute, exchange
from lanes import FinishedWork

from ubatch.dbo import dbo_yield
from ubatch.errors import ConfigError, UBatchError
from ubatch.ranks import host_copy
from ubatch.ranks import transfer as transfer_module
from ubatch.ranks.host_copy import CopiedWork, copy_to_host
from ubatch.ranks.transfer import Transfer
from ubatch.streams import lifetimes
from ubatch.streams.streams import NullEvent


def test_the_host_waits_for_its_numbers_only(lanes: Lanes) -> None:
    def body() -> None:
        counts = compute()
        copies = copy_to_host(counts, counts + 1)
        dbo_yield()
        compute()
        one, other = copies.wait()
        assert (one.tolist(), other.tolist()) == ([2.0] * 4, [3.0] * 4)

    lanes.run(body, body)
    lanes.cuda.check()
    assert not lanes.cuda.syncs


def test_numbers_that_the_host_did_not_wait_for_are_a_race(lanes: Lanes) -> None:
    def body() -> None:
        copies = copy_to_host(compute())
        copies._finish()[0].tolist()  # type: ignore[misc, index]

    lanes.run(body, dbo_yield)
    assert any("has not waited" in each for each in lanes.cuda.races)


def test_waiting_for_the_host_ends() -> None:
    class Never(NullEvent):
        def query(self) -> bool:
            return False

    with pytest.raises(RuntimeError, match="has not arrived"):
        CopiedWork(Never()).wait(timedelta(milliseconds=5))
    assert CopiedWork(NullEvent()).wait()


def test_outside_lanes_what_is_on_the_host_is_there() -> None:
    numbers = torch.arange(3)
    transfer = copy_to_host(numbers)
    assert transfer.done()
    assert transfer.wait()[0] is numbers


def test_lanes_make_no_events_per_step(lanes: Lanes) -> None:
    lanes.run(exchange(), exchange())
    made = lanes.cuda.events
    for _ in range(3):
        lanes.run(exchange(), exchange())
    assert lanes.cuda.events == made == 2 * 3


# ----------------------------------------------------------------------------------------------- while capturing


class _Unaskable(FinishedWork):
    """A work whose event belongs to a capture: asking for it would end the capture."""

    def is_completed(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_nothing_asks_an_event_while_a_graph_is_captured(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "capturing", lambda: True)
    monkeypatch.setattr(lifetimes, "capturing", lambda: True)
    monkeypatch.setattr(host_copy, "capturing", lambda: True)
    monkeypatch.setattr(lifetimes, "_abandoned", [])

    def fails() -> None:
        transfer: Transfer[None] = Transfer("send", [_Unaskable()], lambda: None, stream_ordered=True)
        with pytest.raises(UBatchError, match="'send': it cannot be queried while a graph is captured"):
            transfer.done()
        with pytest.raises(ConfigError, match="'counts': the host reads what the device computes"):
            copy_to_host(compute(), name="counts")
        Transfer("late", [_Unaskable()], lambda: None)
        raise ValueError("original")

    with pytest.raises(ValueError, match="original"):
        lanes.run(fails, dbo_yield)
    kept = [each for each in lifetimes._abandoned if isinstance(each, Transfer)]
    assert [each.name for each in kept] == ["late"], "kept until somebody may ask; the other one's stream was joined"
