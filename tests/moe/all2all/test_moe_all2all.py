"""Transports without a second rank: names, payload rows, traits, and the emulated link.

Of the link: when transfers arrive, what is counted, and what crosses beside them and gives way to them.
"""

import re
import time
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens
from repository import ROOT

from attention.interface import BackendTraits
from moe import All2AllTraits, EmulatedLink, LinkStatistics, all2all_backends, make_all2all
from moe.all2all.emulated_link import _PACKET_BYTES
from moe.all2all.payload import pack_rows, unpack_rows
from ubatch import CommGroup, ConfigError, LinkTime, Transfer

TWO_RANKS = cast(CommGroup, SimpleNamespace(rank=0, size=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(3, 8, 2), (4, 7, 3), (1, 1, 1), (0, 5, 2)])
def test_a_row_carries_everything(dtype: torch.dtype, tokens: int, hidden: int, top_k: int) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.randint(-1, 1000, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    rows = pack_rows(x, ids, weights)
    assert rows.dtype is dtype
    assert rows.shape[1] * rows.element_size() == hidden * dtype.itemsize + top_k * 8
    got_x, got_ids, got_weights = unpack_rows(rows[torch.arange(tokens)], hidden)
    assert torch.equal(got_x, x)
    assert got_ids.tolist() == ids.tolist()
    assert got_ids.dtype is torch.int32
    assert torch.equal(got_weights, weights)


def test_payload_survives_bits_that_are_no_numbers() -> None:
    """Ids seen as floats are denormals and NaNs; they must travel bit by bit."""
    ids = torch.tensor([[-1, 0x7F800001, 1]])
    _, got, _ = unpack_rows(pack_rows(torch.zeros(1, 2), ids, torch.zeros(1, 3))[[0, 0]], 2)
    assert got.tolist() == ids.tolist() * 2


def test_local_hands_through() -> None:
    layer = make_layer()
    routed = make_tokens(layer, 5)
    local = make_all2all("local", group=None, num_experts=8)
    assert local.experts == range(8)
    dispatched = local.dispatch(routed.x, routed.ids, routed.weights).wait()
    assert dispatched.hidden_states is routed.x
    assert dispatched.experts == range(8)
    assert local.combine(routed.x, dispatched.handle).wait() is routed.x


def test_bad_names_and_options_are_refused() -> None:
    assert {"local", "torch_dist", "allgather_reducescatter", "emulated_link"} <= set(all2all_backends())
    link = EmulatedLink(0.0, 1.0)
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("torchdist", {}, "unknown all2all back end 'torchdist'; did you mean 'torch_dist'"),
        ("local", {"link": link}, r"'local': got an unexpected keyword argument 'link'.* group, num_experts"),
        ("local", {"group": TWO_RANKS}, "'local' holds all experts on one rank, but the group has 2"),
        ("torch_dist", {}, "needs a CommGroup, not NoneType"),
        ("allgather_reducescatter", {}, "needs a CommGroup, not NoneType"),
        ("emulated_link", {}, "'emulated_link': missing a required argument: 'link'"),
        ("emulated_link", {"link": 1.0}, "link must be an EmulatedLink, not float"),
        ("emulated_link", {"link": link, "inner": "emulated_link"}, "cannot wrap itself"),
        ("emulated_link", {"link": link, "inner": "local", "speed": "high"}, "'local': got an unexpected .* 'speed'"),
    ]
    for name, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            make_all2all(name, **{"group": None, "num_experts": 8, **options})


def test_what_a_chunk_costs() -> None:
    def traits(other_ranks: int, routed: bool) -> All2AllTraits:
        return All2AllTraits(True, False, False, None, 1, other_ranks, routed)

    one_way_and_back = 2 * 16 * 2 + 4 * 8  # a bf16 row each way, four ids with their weights
    assert traits(7, routed=True).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 4 * one_way_and_back
    assert traits(2, routed=True).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 2 * one_way_and_back
    assert traits(7, routed=False).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 7 * one_way_and_back
    assert make_all2all("local", group=None, num_experts=8).traits.chunk_bytes(10, 16, 4, torch.float32) == 0


@pytest.mark.long
def test_every_trait_is_read() -> None:
    """What a back end states and nobody asks is a promise that nothing keeps."""
    root = ROOT
    packages = ("ubatch", "moe", "attention", "model_runner", "serving")
    source = "\n".join(file.read_text() for package in packages for file in sorted((root / package).rglob("*.py")))
    for traits in (All2AllTraits, BackendTraits):
        for name in (field.name for field in fields(traits)):
            assert re.search(rf"(traits|self)\.{name}\b|\(\"{name}\", shape", source), f"{traits.__name__}.{name}"


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
