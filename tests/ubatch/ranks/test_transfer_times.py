"""Plain records of transfers: in the caller, in lanes, and not at all when nobody asks."""

from __future__ import annotations

import time

import pytest

from ubatch.ranks.transfer import Transfer
from ubatch.ranks.transfer_times import arrivals_now, record_transfers


class Arrived:
    """A work that takes a moment."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> bool:
        time.sleep(self.seconds)
        return True


def test_transfers_are_recorded_in_the_order_of_their_waits() -> None:
    with record_transfers() as arrivals:
        first, second = (Transfer(name, [Arrived(0.01)], lambda: None) for name in ("dispatch", "combine"))
        second.wait()
        first.wait()
        first.wait()  # a second wait is none
        Transfer.ready(1).wait()  # nothing was sent
    assert [each.name for each in arrivals] == ["combine", "dispatch"]
    for each in arrivals:
        assert each.launched <= each.waited <= each.arrived - 0.009
        assert 0 <= each.cpu_s < 0.009


def test_an_emulated_links_deadline_is_the_arrival() -> None:
    with record_transfers() as arrivals:
        transfer = Transfer("dispatch", [Arrived()], lambda: None)
        deadline = time.monotonic() + 0.01
        transfer.delay_until(deadline)
        time.sleep(0.02)
        transfer.wait()
    assert arrivals[0].arrived == deadline


def test_nothing_is_recorded_outside() -> None:
    with record_transfers() as arrivals, pytest.raises(ValueError, match="invalid literal"):
        int("x")
    assert arrivals_now() is None
    Transfer("dispatch", [Arrived()], lambda: None).wait()
    assert arrivals == []
