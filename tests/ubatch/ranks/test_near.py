"""Small messages between ranks of one machine: what arrives, in which order, and what a failure does."""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, DeclineReason, GroupBroken, LaunchOrderError, Offer, PeerFailed, Wish, launch_all_gather
from ubatch.ranks import near
from ubatch.ranks.near import MOST_BYTES, Channel, NearRanks, NearWork, OtherLaunch, connect_near
from ubatch.ranks.ways import _WRITABLE, _bytes_at

SOON = timedelta(seconds=5)


@contextlib.contextmanager
def connected(ranks: int = 2) -> Iterator[list[NearRanks]]:
    """The ranks' ends, all in this process."""
    ends: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
    for low in range(ranks):
        for high in range(low + 1, ranks):
            ends[low][high], ends[high][low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = [NearRanks(own) for own in ends]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def launch(
    ranks: NearRanks, rows: list[int], *, mark: int = 0, channel: Channel = Channel.DATA
) -> tuple[NearWork, Tensor]:
    """Send one number to every rank."""
    result = torch.full((len(rows),), -1)
    ones = [1] * len(rows)
    return exchange(ranks, torch.tensor(rows), result, ones, ones, mark=mark, channel=channel), result


def memory(x: Tensor) -> memoryview:
    view: memoryview = _bytes_at(x.data_ptr() or 1, x.nbytes, _WRITABLE)
    return view


def exchange(
    ranks: NearRanks,
    source: Tensor,
    result: Tensor,
    sent: list[int] | None,
    received: list[int],
    *,
    mark: int = 0,
    channel: Channel = Channel.DATA,
) -> NearWork:
    """Of rows of a tensor."""
    row_bytes = math.prod(source.shape[1:]) * source.element_size()
    return ranks.exchange(
        channel, memory(source), memory(result), sent, received, row_bytes, mark=mark, keep=(source, result)
    )


def test_rows_arrive_whatever_is_launched_and_waited_for_first() -> None:
    with connected(3) as ranks:
        first = [launch(each, [10 * rank + to for to in range(3)]) for rank, each in enumerate(ranks)]
        votes = [launch(each, [rank] * 3, channel=Channel.VOTES) for rank, each in enumerate(ranks)]
        second = [launch(each, [100 + rank] * 3) for rank, each in enumerate(reversed(ranks))][::-1]
        for rank in range(3):
            for launched, expected in (
                (second, [102, 101, 100]),
                (votes, [0, 1, 2]),
                (first, [rank, 10 + rank, 20 + rank]),
            ):
                work, result = launched[rank]
                assert work.wait(SOON)
                assert work.is_completed()
                assert result.tolist() == expected


def test_uneven_and_empty_parts_and_all_rows_to_each() -> None:
    with connected(3) as ranks:
        sizes = [[2, 0, 1], [1, 1, 0], [0, 3, 0]]  # [from][to]
        works = []
        for rank, each in enumerate(ranks):
            source = torch.arange(sum(sizes[rank])) + 10 * rank
            received = [of[rank] for of in sizes]
            result = torch.full((sum(received),), -1)
            works.append((exchange(each, source, result, sizes[rank], received), result))
        for (work, result), expected in zip(works, ([0, 1, 10], [11, 20, 21, 22], [2]), strict=True):
            work.wait(SOON)
            assert result.tolist() == expected
        works = []
        for rank, each in enumerate(ranks):
            result = torch.full((3, 2), -1)
            works.append((exchange(each, torch.full((rank, 2), rank), result, None, [0, 1, 2]), result))
        for work, result in works:
            work.wait(SOON)
            assert result[:, 0].tolist() == [1, 2, 2]


def test_full_sockets_lose_nothing() -> None:
    """Nobody reads for a long time: what has no room is sent on while ranks wait."""
    with connected() as ranks:
        size, count = MOST_BYTES // 8, 400
        works = []
        for number in range(count):
            for rank, each in enumerate(ranks):
                result = torch.full((2, size), -1)
                source = torch.full((1, size), 1000 * rank + number)
                works.append((exchange(each, source, result, None, [1, 1]), result, number))
        assert all(peer.unsent for each in ranks for peer in each._peers if peer), "the sockets have no room left"
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda own: [each.wait(SOON) for each, *_ in own], (works[::2], works[1::2])))
        for work, result, number in works:
            assert work.is_completed()
            assert (result == torch.tensor([[number], [1000 + number]])).all()


def test_a_wait_has_a_limit_and_can_be_repeated() -> None:
    with connected() as (low, high):
        work, result = launch(low, [1, 2])
        begun, busy = time.monotonic(), time.process_time()
        with pytest.raises(RuntimeError, match="not over within"):
            work.wait(timedelta(seconds=0.3))
        assert time.monotonic() - begun < 2
        assert time.process_time() - busy < 0.2
        assert not work.is_completed()
        launch(high, [3, 4])
        assert work.wait(SOON)
        assert result.tolist() == [1, 3]


def test_threads_wait_for_different_exchanges_at_once() -> None:
    with connected() as (low, high):
        works = [launch(low, [number, number])[0] for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            waits = [threads.submit(work.wait, SOON) for work in works]
            for number in range(8):
                time.sleep(0.01)
                launch(high, [number, number])
            assert all(wait.result(5) for wait in waits)


OTHERWISE = "rank 1 of the group sent something else than this rank expects: the ranks launch in different orders"


def test_ranks_that_launch_different_things_are_told() -> None:
    """Another mark, another size, rows that nobody expects, and launches that only one rank makes this way."""
    with connected() as (low, high):
        work, result = launch(low, [1, 2], mark=7)
        launch(high, [3, 4], mark=8)
        with pytest.raises(OtherLaunch, match=OTHERWISE):
            work.wait(SOON)
        assert result.tolist() == [1, -1]
        with pytest.raises(OtherLaunch, match=OTHERWISE):
            launch(low, [1, 2])[0].wait(SOON)
    with connected() as (low, high):
        launch(high, [5, 6])  # arrives first
        low.read(1)
        work = exchange(low, torch.zeros(2), torch.zeros(4), [1, 1], [1, 3])
        with pytest.raises(OtherLaunch, match=OTHERWISE):
            work.wait(SOON)
    for early in (True, False):
        with connected() as (low, high):
            if early:
                launch(high, [5, 6])
                low.read(1)
            work = exchange(low, torch.zeros(2), torch.zeros(1), [1, 1], [1, 0])
            if not early:
                launch(high, [5, 6])
                low.read(1)
                work = launch(low, [1, 2])[0]
            with pytest.raises(OtherLaunch, match=OTHERWISE):
                work.wait(SOON)
    with connected() as (low, high):
        low.pass_by(Channel.DATA)  # with gloo
        work = launch(low, [1, 2])[0]
        launch(high, [3, 4])
        with pytest.raises(OtherLaunch, match=OTHERWISE):
            work.wait(SOON)


def test_an_error_of_one_rank_is_not_forgotten_for_the_next() -> None:
    with connected(3) as ranks:
        launch(ranks[1], [1, 1, 1], mark=5)
        ranks[0].read(1)
        work = launch(ranks[0], [0, 0, 0])[0]  # the second rank's message is wrong, the third one's comes later
        launch(ranks[2], [2, 2, 2])
        for _ in range(2):
            with pytest.raises(OtherLaunch):
                work.wait(SOON)
        assert work.is_completed()


def test_long_messages_come_in_several_packets() -> None:
    """Nobody knew that they would be so long."""
    with connected() as (low, high):
        size = 3 * MOST_BYTES // 8 + 5
        there, back = torch.full((2, size), -1), torch.full((2, size), -1)
        first = exchange(high, torch.arange(size)[None] + 9, there, None, [1, 1])
        low.read(1)  # the first packet is early, the others are expected
        second = exchange(low, torch.arange(size)[None], back, None, [1, 1])
        assert first.wait(SOON)
        assert second.wait(SOON)
        for result in (there, back):
            assert torch.equal(result, torch.stack([torch.arange(size), torch.arange(size) + 9]))


def test_nobody_sees_a_message_before_it_is_there() -> None:
    """Another thread reads it."""
    interval, ended = sys.getswitchinterval(), threading.Event()
    with connected() as (low, high):

        def read() -> None:
            while not ended.is_set():
                low.read(0.001)

        reader = threading.Thread(target=read)
        reader.start()
        sys.setswitchinterval(1e-5)
        try:
            for number in range(300):
                work, result = launch(low, [number, number])
                there, _ = launch(high, [number, number])
                assert work.wait(SOON)
                assert there.wait(SOON)
                assert result.tolist() == [number, number]
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            reader.join()


def test_a_lost_rank_fails_only_what_needs_it() -> None:
    with connected(3) as ranks:
        waiting = launch(ranks[0], [0, 1, 2])[0]
        ranks[2].close()
        with pytest.raises(RuntimeError, match="rank 2 of the group"):
            waiting.wait(SOON)
        assert waiting.is_completed()
        with pytest.raises(RuntimeError, match="rank 2"):
            launch(ranks[0], [0, 1, 2])[0].wait(SOON)
        result = torch.full((2,), -1)
        without = exchange(ranks[0], torch.arange(2), result, [1, 1, 0], [1, 1, 0])
        for number in (1, 1, 0):
            exchange(ranks[1], torch.tensor([8, 9]), torch.zeros(2, dtype=torch.int64), [1, 1, 0], [1, 1, 0])
            if number == 0:
                without.wait(SOON)
                assert result.tolist() == [0, 8]


def test_what_is_given_up_ends_here_and_arrives_there() -> None:
    with connected() as (low, high):
        work, result = launch(high, [3, 4])
        launch(low, [1, 2])
        given_up = launch(low, [5, 6])[0]
        low.stop()
        with pytest.raises(RuntimeError, match="was given up"):
            given_up.wait(SOON)
        assert work.wait(SOON)
        assert result.tolist() == [2, 4]


def test_ranks_that_cannot_meet_use_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(near.tempfile, "tempdir", str(tmp_path))
    asked: list[str] = []

    def tell(text: str) -> list[str]:
        asked.append(text)
        return [text, text.replace("\n", "elsewhere\n")]

    assert connect_near(0, 2, tell, 5.0) is None
    assert asked[-1] == "no"
    assert not caplog.records
    monkeypatch.setattr(near.tempfile, "tempdir", str(tmp_path / "missing"))
    assert connect_near(0, 2, lambda text: [text, text], 5.0) is None
    assert "exchange small messages over gloo" in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(near.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="ranks of this machine could not connect"):  # the other never comes
        connect_near(0, 2, lambda text: [text, text], 0.2)
    assert list(tmp_path.iterdir()) == []


# -- between processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(3)
def test_ranks_of_one_network_are_near(rank: int, group: CommGroup, apart: bool) -> None:
    with mock.patch.object(near, "_network", return_value=rank if apart else 0):  # a slower link may be between them
        for _ in range(2):
            group.reset()
            assert (group.usable_connection().near is None) == apart
            assert ubatch.all_gather(torch.tensor([float(rank)]), group).tolist() == [0.0, 1.0, 2.0]


@on_ranks(2)
def test_a_forked_child_has_no_part_in_it(rank: int, group: CommGroup) -> None:
    """A forked child neither reads what is its parent's nor keeps a dead parent's connections alive."""
    transfer = launch_all_gather(torch.tensor([rank]), group)
    near = group.usable_connection().near
    with near._state:  # of a thread that is not in the child
        child = os.fork()
    if child == 0:
        with contextlib.suppress(GroupBroken):
            transfer.wait()
            os._exit(1)
        closed = [peer.socket.fileno() for peer in near._peers if peer]
        near.close()
        os._exit(0 if closed == [-1] else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert transfer.wait().tolist() == [0, 1]
    assert ubatch.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]


@on_ranks(2)
def test_another_launch_is_no_dead_rank(rank: int, group: CommGroup) -> None:
    with pytest.raises((LaunchOrderError, PeerFailed), match="the ranks launch in different orders"):
        launch_all_gather(torch.tensor([rank]), group, name="this" if rank else "that").wait()
    group.reset()
    assert ubatch.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]


@on_ranks(2)
def test_odd_tensors_arrive_as_what_they_are(rank: int, group: CommGroup) -> None:
    """What a transport that copies memory must not take as it lies there; and ballots inside a transform."""
    x = torch.tensor([[1 + 2j, 3 - 1j]]) * (rank + 1)
    gathered = ubatch.all_gather(x.conj(), group)
    assert torch.equal(gathered, torch.cat([torch.tensor([[1 - 2j, 3 + 1j]]) * each for each in (1, 2)]))
    assert torch.equal(ubatch.all_gather(x.conj().imag, group)[rank], x.conj().imag[0])
    waited_for = funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    assert type(waited_for) is not Tensor
    assert ubatch.all_gather(waited_for, group).tolist() == [0, 0, 1, 1] * 2

    def loss(x: Tensor) -> Tensor:
        return x.sum() * len(group.vote(Offer(Wish.NO, (1,), 1, reason=DeclineReason.NOT_REQUESTED)).tokens)

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [2.0, 2.0]


@on_ranks(2)
def test_a_reset_in_a_step_waits_for_late_ranks(rank: int, group: CommGroup) -> None:
    """A peer that is late while the ranks connect anew, inside a step of the old connection, is waited for."""
    look, late_s = near._network, 0.6 * rank

    def slowly() -> int:
        time.sleep(late_s)
        return look()

    with group.step(), mock.patch.object(near, "_network", slowly):
        group.recover("a try")
        assert ubatch.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]


@on_ranks(3)
def test_ranks_that_give_their_sizes_or_not_go_the_same_way(rank: int, group: CommGroup) -> None:
    """One rank's blocks are equal by chance, so that it gives no sizes."""
    sizes = [[1, 1, 1], [1, 2, 3], [1, 3, 1]]
    rows = torch.full((sum(sizes[rank]),), rank)
    if rank:
        received = ubatch.all_to_all_single(rows, group, [of[rank] for of in sizes], sizes[rank])
    else:
        received = ubatch.all_to_all_single(rows, group)
    expected = [source for source, of in enumerate(sizes) for _ in range(of[rank])]
    assert received.tolist() == expected
