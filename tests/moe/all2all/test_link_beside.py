"""What crosses the emulated link beside its transfers gives way to them, and arrives when the link had time for it."""

from __future__ import annotations

import pytest

from moe import EmulatedLink
from moe.all2all.link import _PACKET_BYTES
from ubatch import Transfer

RATE = 1e6
PACKET_S = _PACKET_BYTES / RATE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def linked(latency_s: float = 0.0) -> tuple[EmulatedLink, Clock]:
    clock = Clock()
    return EmulatedLink(latency_s, RATE, clock=clock), clock


def transfer(link: EmulatedLink, num_bytes: int) -> float:
    """Send and receive; returns the deadline."""
    made = Transfer.ready(None)
    made.bytes_sent = made.bytes_received = num_bytes
    return link.carry(made)._deadline


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
    deadline = transfer(link, 10_000)
    assert deadline == pytest.approx(100 + 3 * PACKET_S + 0.01)
    second = transfer(link, 10_000)
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
    clock = Clock()
    link = EmulatedLink(0.25, float("inf"), clock=clock)
    work = link.beside(10**9, 10**9)
    clock.now += 0.3
    assert work.is_completed()
