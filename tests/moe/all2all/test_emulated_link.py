"""The emulated link: when transfers arrive, what is counted, and what crosses beside them and gives way to them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe import EmulatedLink, LinkStatistics
from moe.all2all.emulated_link import _PACKET_BYTES
from ubatch import ConfigError, LinkTime, Transfer

RATE = 1e6
PACKET_S = _PACKET_BYTES / RATE


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def linked(latency_s: float = 0.0, bytes_per_s: float = RATE) -> tuple[EmulatedLink, Clock]:
    clock = Clock()
    return EmulatedLink(latency_s, bytes_per_s, clock=clock), clock


def transfer(sent: int, received: int) -> Transfer[None]:
    return Transfer("test", (), lambda: None, bytes_sent=sent, bytes_received=received)


def carry(link: EmulatedLink, sent: int, received: int) -> Transfer[None]:
    return link.carry(transfer(sent, received))


def test_deadlines() -> None:
    link, clock = linked(0.5, 10.0)
    first = carry(link, 20, 10)
    assert (first._started, first._deadline) == (100.0, 102.5)  # 0.5 s + 20 bytes at 10 bytes/s, the later direction
    clock.now = 101.0
    second = carry(link, 10, 10)  # sends after the first, receives at once: that direction freed up at 101.5
    assert (second._started, second._deadline) == (101.5, 104.0)
    clock.now = 110.0
    third = carry(link, 0, 5)  # idle since: starts now; nothing is sent, so only the receive counts
    assert (third._started, third._deadline, third._link) == (110.0, 111.0, LinkTime(0.0, 1.0))
    counts = transfer(8, 8)
    link.signal(counts)  # the latency alone, past what is queued
    assert counts._deadline == 110.5
    nothing = carry(link, 0, 0)
    link.signal(nothing)
    assert (nothing._started, nothing._deadline) == (nothing._launched, 0.0)
    assert link.statistics() == LinkStatistics(3, 30, 25, 4.0, 4.0)


def test_at_once_nothing_waits_and_everything_is_counted() -> None:
    link, _ = linked(0.5, 10.0)
    with link.at_once():
        first, second = carry(link, 20, 10), carry(link, 10, 0)
        counts = transfer(8, 8)
        link.signal(counts)
        assert carry(link, 0, 0)._link is None
    assert (first._deadline, second._deadline, counts._deadline) == (0.0, 0.0, 0.0)
    assert (first._link, second._link) == (LinkTime(2.5, 1.5), LinkTime(1.5, 0.0))
    assert link.statistics() == LinkStatistics(2, 30, 10, 4.0, 1.5)
    assert carry(link, 10, 10)._deadline == 101.5  # the link is still free


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0.0, 3.0)), max_size=12),
    st.floats(0.0, 1.0),
    st.floats(1.0, 100.0),
)
def test_one_transfer_at_a_time_per_direction(
    transfers: list[tuple[int, int, float]], latency_s: float, bytes_per_s: float
) -> None:
    """Deadlines equal those of two queues worked off one by one, and the seconds counted are theirs."""
    link, clock = linked(latency_s, bytes_per_s)
    free = [0.0, 0.0]
    busy = [0.0, 0.0]
    for sent, received, pause in transfers:
        clock.now += pause
        deadline = carry(link, sent, received)._deadline
        finishes = []
        for direction, size in enumerate((sent, received)):
            if size:
                duration = latency_s + size / bytes_per_s
                free[direction] = max(clock.now, free[direction]) + duration
                busy[direction] += duration
                finishes.append(free[direction])
        assert deadline == pytest.approx(max(finishes, default=0.0))
    counted = link.reset_statistics()
    assert (counted.send_busy_s, counted.receive_busy_s) == pytest.approx(tuple(busy))
    assert counted.busy_s == max(counted.send_busy_s, counted.receive_busy_s)
    assert link.statistics() == LinkStatistics(0, 0, 0, 0.0, 0.0)
    clock.now += 1e-3
    if transfers:  # a reset forgets what was counted, not what is under way
        assert carry(link, 1, 0)._deadline >= free[0]


def test_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"latency_s must be at least 0, not -1\.0"):
        EmulatedLink(-1.0, 1.0)
    for bandwidth in (0.0, -5.0, float("nan")):
        with pytest.raises(ConfigError, match="bytes_per_s must be positive"):
            EmulatedLink(0.0, bandwidth)


def test_a_transfer_over_the_link_waits_for_its_deadline() -> None:
    """With the real clock: `wait` sleeps, and what stays on its rank does not."""
    link = EmulatedLink(0.02, float("inf"))
    carried: Transfer[int] = Transfer("test", (), lambda: 7, bytes_sent=1, bytes_received=1)
    launched = time.monotonic()
    assert not link.carry(carried).done()
    assert carried.wait() == 7
    assert time.monotonic() - launched >= 0.02
    assert link.carry(Transfer.ready(8)).done()


# -- what gives way ----------------------------------------------------------------------------------------------------


def test_an_idle_link_takes_the_time_of_the_bytes() -> None:
    link, clock = linked(latency_s=0.5)
    work = link.beside(3 * _PACKET_BYTES, _PACKET_BYTES)
    clock.now += 3 * PACKET_S + 0.49
    assert not work.is_completed()
    clock.now += 0.02
    assert work.is_completed()


def test_a_transfer_waits_for_one_packet_at_most() -> None:
    link, clock = linked()
    work = link.beside(100 * _PACKET_BYTES, 100 * _PACKET_BYTES)
    clock.now += 2.5 * PACKET_S
    deadline = carry(link, 10_000, 10_000)._deadline
    assert deadline == pytest.approx(100 + 3 * PACKET_S + 0.01)
    second = carry(link, 10_000, 10_000)._deadline
    assert second == pytest.approx(deadline + 0.01)  # no packet gets in between
    clock.now = 100 + 100 * PACKET_S + 0.015
    assert not work.is_completed()  # transfers took 0.02 s of it
    clock.now += 0.006
    assert work.is_completed()


def test_what_came_first_is_sent_first_and_nothing_is_lost() -> None:
    link, clock = linked()
    first, second = link.beside(_PACKET_BYTES, 0), link.beside(_PACKET_BYTES + 10, 0)
    clock.now += 1.01 * PACKET_S
    assert first.is_completed()
    assert not second.is_completed()
    clock.now += PACKET_S + 11 / RATE
    assert second.is_completed()
    assert link.beside(0, 0).is_completed()
    assert link.statistics().transfers == 0


def test_at_once_it_arrives_at_once() -> None:
    link, _ = linked(latency_s=1.0)
    with link.at_once():
        assert link.beside(10**9, 10**9).is_completed()


def test_a_rate_without_bound_leaves_the_latency() -> None:
    link, clock = linked(0.25, float("inf"))
    work = link.beside(10**9, 10**9)
    clock.now += 0.3
    assert work.is_completed()
