"""Ranks that are late, absent or interrupted: the others wait no longer than necessary and name the rank."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from peer_failure_cases import GROUP_TIMEOUT_S, healthy_step, lasting, promptly, wrap
from torch.distributed import distributed_c10d as c10d

import ubatch
from ranks import free_port, on_ranks
from ubatch import CommGroup, GroupBroken, PeerFailed, TransferTimeout, launch_all_gather
from ubatch.ranks.transports import _kept

pytestmark = pytest.mark.ranks

# --------------------------------------------------------------------------------------------------- late or absent


@pytest.mark.slow
@on_ranks(2, timeout_s=2.0)
def test_slow_ranks_are_waited_for_and_absent_ones_not_for_ever(rank: int, group: CommGroup) -> None:
    model, probe = wrap(group)
    store = c10d._get_default_store()

    # Merely slow: several slices of waiting, then it completes, in the vote and in a transfer.
    for rows in (8, 3):
        if rank == 1:
            time.sleep(0.5)
        healthy_step(model, probe, 1, rows)
    if rank == 1:
        time.sleep(0.5)
    assert launch_all_gather(torch.tensor([rank]), group).wait().tolist() == [0, 1]

    # Absent: the one that waits times out, and the other learns that as soon as it comes.
    if rank == 0:
        with (
            lasting(group.timeout_s),
            pytest.raises(TransferTimeout, match=r"rank 0 waited for 'vote' longer than 2\.0 s"),
        ):
            model(torch.ones(8, 2))
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        with promptly(), pytest.raises(PeerFailed, match=r"rank 0 waited for 'vote' longer than 2\.0 s"):
            model(torch.ones(8, 2))

    # Only one calls reset(): it times out, twice. The other comes between two attempts, and must not count on one
    # that is over.
    if rank == 0:
        for _ in range(2):
            with (
                lasting(group.timeout_s),
                pytest.raises(TransferTimeout, match=r"ranks \[1\] of \[0, 1\] did not come"),
            ):
                group.reset()
            with pytest.raises(GroupBroken):
                model(torch.ones(8, 2))
        store.set("tried twice", "")
        time.sleep(0.3)
    else:
        store.wait(["tried twice"])
    with promptly():
        group.reset()
    healthy_step(model, probe, 2)
    group.reset()  # no failure: harmless
    healthy_step(model, probe, 3)


@on_ranks(2, timeout_s=5.0)
def test_a_transfer_from_before_a_reset_stays_there(rank: int, group: CommGroup) -> None:
    """A transfer launched before a reset is never mixed up with what comes after it."""
    stale = launch_all_gather(torch.tensor([-1.0]), group) if rank == 0 else None
    group.reset()
    assert ubatch.all_gather(torch.tensor([float(rank)]), group).tolist() == [0.0, 1.0]
    if stale is not None:
        with promptly(), pytest.raises(GroupBroken, match=r"reset\(\) was called"):
            stale.wait()
    assert group.broken is None
    assert ubatch.all_gather(torch.tensor([float(rank)]), group).tolist() == [0.0, 1.0]


@on_ranks(2, timeout_s=5.0)
def test_a_rank_that_was_taken_for_dead_is_told(rank: int, group: CommGroup) -> None:
    if rank == 0:
        group.usable_connection().fail("rank 1 died.", rank=1)
    else:
        with promptly(), pytest.raises(GroupBroken, match=r"the other ranks gave this one up: rank 1 died"):
            ubatch.all_reduce(torch.ones(1), group)
    group.reset()
    assert ubatch.all_reduce(torch.ones(1), group).item() == 2.0


@on_ranks(2, timeout_s=1.5)
def test_ranks_that_disagree_do_not_hang(rank: int, group: CommGroup) -> None:
    """Ranks that call different collectives wait for each other; both are told, and both can go on."""
    with pytest.raises((TransferTimeout, PeerFailed), match=r"longer than 1\.5 s"):
        (ubatch.all_reduce if rank else ubatch.all_gather)(torch.ones(4), group)
    group.reset()
    assert ubatch.all_reduce(torch.ones(1), group).item() == 2.0


# --------------------------------------------------------------------------------------------------------- death


@pytest.mark.parametrize(("world_size", "dying"), [(2, [0]), (2, [1]), (3, [0]), (3, [1])])
@on_ranks(timeout_s=GROUP_TIMEOUT_S)
def test_a_rank_that_dies_is_named(rank: int, group: CommGroup, world_size: int, dying: list[int]) -> None:
    """Rank 0 hosts the rendezvous store, which dies with it."""
    model, probe = wrap(group)
    rows = 8 if dying[0] else 3
    healthy_step(model, probe, 1, rows)
    if rank in dying:
        threading.Timer(0.5, os._exit, (9,)).start()
        time.sleep(60)
    with promptly(), pytest.raises(PeerFailed, match=f"rank {dying[0]} died") as caught:
        model(torch.ones(rows, 2))
    assert caught.value.rank == dying[0]
    with promptly(), pytest.raises(GroupBroken):
        model(torch.ones(rows, 2))


@on_ranks(2, timeout_s=GROUP_TIMEOUT_S, dying=[1])
def test_a_rank_that_dies_in_mid_step_is_named(rank: int, group: CommGroup) -> None:
    model, probe = wrap(group)

    def die(*_: object) -> None:
        if rank == 1 and ubatch.dbo_current_ubatch_id() == 1:
            os._exit(9)

    probe.exchange = die  # type: ignore[method-assign]
    with promptly(), pytest.raises(PeerFailed, match="rank 1 died, or let go of the group") as caught:
        model(torch.ones(8, 2))
    assert caught.value.rank == 1
    group.timeout_s = 1.0
    with pytest.raises(TransferTimeout, match=r"ranks \[1\]"):
        group.reset()
    assert "raised in lane" in str(caught.value.__notes__)


# ------------------------------------------------------------------------------------------------------- Ctrl-C


@on_ranks(2, timeout_s=GROUP_TIMEOUT_S)
def test_ctrl_c_on_one_rank_ends_its_wait_and_the_others(rank: int, group: CommGroup) -> None:
    model, probe = wrap(group)
    main = threading.main_thread().ident
    store = c10d._get_default_store()
    for where in ("lane", "vote", "unsplit"):
        rows = 3 if where == "unsplit" else 8

        def press_ctrl_c(where: str = where, main: int = main) -> None:
            signal.pthread_kill(main, signal.SIGINT)
            store.set(f"interrupted in {where}", "")

        def wait_for_it(*_: object, where: str = where) -> None:
            store.wait([f"interrupted in {where}"])

        if rank == 0:
            # It waits for rank 1, which is not in a hurry, and the user is.
            timer = threading.Timer(0.5, press_ctrl_c)
            probe.step, probe.failures = 1, ()
            with promptly(), pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come as soon as this has started
                timer.start()
                model(torch.ones(rows, 2))
            timer.join()
        else:
            if where == "vote":
                wait_for_it()
            else:
                probe.step, probe.failures = 1, ()
                probe.exchange = wait_for_it  # type: ignore[method-assign]
            with promptly(), pytest.raises(PeerFailed, match="rank 0 failed with KeyboardInterrupt") as caught:
                model(torch.ones(rows, 2))
            assert caught.value.rank == 0
            probe.__dict__.pop("exchange", None)
        group.reset()
        healthy_step(model, probe, 2)


# ----------------------------------------------------------------------------------------------------------- exit


LEAVE = """
import sys, time
from contextlib import suppress
import torch, torch.distributed as dist
import ubatch

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
failed, reset, dropped, ignored = (ubatch.CommGroup.from_process_group(timeout_s=10.0) for _ in range(4))
if rank == 0:
    for group in (failed, reset, dropped, ignored):
        ubatch.launch_all_reduce(torch.ones(4), group)
        ubatch.launch_all_gather(torch.ones(4), group)
    with suppress(ZeroDivisionError), failed.step():
        1 / 0
reset.reset()
del dropped
print(time.monotonic(), flush=True)
if rank == 0:
    dist.destroy_process_group()
else:
    sys.stdin.read()
    print(time.monotonic(), flush=True)
"""


@pytest.mark.slow
def test_the_interpreter_ends_promptly() -> None:
    """It ends with transfers that will never complete. The transport would wait 4 x 10 s for each of them."""
    command = [sys.executable, "-c", LEAVE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    port = str(free_port())
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen([*command, str(rank), port], env=environment, text=True, stdin=pipe, stdout=pipe)
        for rank in range(2)
    ]
    try:
        for rank in ranks:  # the second one lives until the first has ended
            output, _ = rank.communicate(timeout=60)
            assert time.monotonic() - float(output.split()[-1]) < 15.0
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()


@on_ranks(2, timeout_s=10.0)
def test_old_process_groups_are_let_go_of(rank: int, group: CommGroup) -> None:
    """Old process groups go once nothing can be stuck in them any more, and threads with them."""
    for _ in range(3):
        group.reset()
    assert len(_kept) == 12
    _kept[:] = [(until - 1000.0, pg) for until, pg in _kept]  # that much later
    group.reset()
    assert len(_kept) <= 4
