"""What the other ranks see when one of them fails, and how all of them go on.

Every payload in here says which step, layer, lane and rank sent it, and every receiver checks that: no tensor of one
step is ever paired with another step's.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import ubatch
from ranks import free_port, run_ranks
from ubatch import (
    CommGroup,
    GroupBroken,
    PeerFailed,
    TransferTimeout,
    UBatchConfig,
    UBatchWrapper,
    dbo_current_ubatch_id,
    dbo_enabled,
    launch_all_gather,
)
from ubatch.connection import _kept

PROMPT_S = 3.0
"""A failed peer must be noticed well within the group's time-out of 10 s; measured: a slice of 0.2 s and a little."""
LAYERS = 4


class BoomError(Exception):
    """What a test's module raises."""


@dataclass(frozen=True)
class Failure:
    """Where a rank's module raises: in which lane, before which layer (`LAYERS`: after the last one)."""

    rank: int
    lane: int
    layer: int
    launched: bool = False  # with a transfer in the air


class Probe(nn.Module):
    """Layers of collectives that check whom and when each tensor comes from. Output: the input times the ranks."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.step = 0
        self.failures: tuple[Failure, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        lane = dbo_current_ubatch_id()
        for layer in range(LAYERS):
            self.maybe_fail(lane, layer)
            self.exchange(lane, layer)
            x = ubatch.all_reduce(x, self.group) / self.group.size
        self.maybe_fail(lane, LAYERS)
        return x * self.group.size

    def maybe_fail(self, lane: int, layer: int) -> None:
        for failure in self.failures:
            if (failure.rank, failure.lane if dbo_enabled() else 0, failure.layer) == (self.group.rank, lane, layer):
                if failure.launched:
                    launch_all_gather(torch.tensor([[self.step, -1, -1, -1]]), self.group)
                raise BoomError(f"step {self.step}, lane {lane}, layer {layer}")

    def exchange(self, lane: int, layer: int) -> None:
        size = self.group.size
        mine = torch.tensor([[self.step, layer, lane, self.group.rank]]).repeat(size, 1)
        received = ubatch.all_to_all_single(mine, self.group).tolist()
        assert received == [[self.step, layer, lane, rank] for rank in range(size)], f"paired with {received}"


def wrap(group: CommGroup) -> tuple[UBatchWrapper, Probe]:
    probe = Probe(group)
    return UBatchWrapper(probe, UBatchConfig(dbo_prefill_token_threshold=4, group=group)), probe


def healthy_step(model: UBatchWrapper, probe: Probe, step: int, rows: int = 8) -> None:
    probe.step, probe.failures = step, ()
    x = torch.arange(rows, dtype=torch.float32).repeat(2, 1).T.contiguous()
    assert torch.equal(model(x), x * probe.group.size)


@contextmanager
def promptly(seconds: float = PROMPT_S) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """It takes this long, and not much longer."""
    begun = time.monotonic()
    yield
    assert seconds <= time.monotonic() - begun < seconds + 1.0


# ---------------------------------------------------------------------------------------------- a lane, then the ranks

PLACES = {
    "mid-layer": Failure(rank=0, lane=1, layer=2),
    "mid-layer, with a transfer in the air": Failure(rank=0, lane=1, layer=2, launched=True),
    "before the first transfer, after the vote": Failure(rank=0, lane=0, layer=0),
    "on the other rank": Failure(rank=1, lane=0, layer=3),
}


def fail_and_recover(rank: int, world_size: int) -> None:
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)
    step = 0
    for rows in (8, 3):  # in lanes, and below the threshold
        for name, failure in PLACES.items():
            healthy_step(model, probe, step := step + 1, rows)
            probe.step, probe.failures = (step := step + 1), (failure,)
            with promptly(), pytest.raises(BoomError if rank == failure.rank else PeerFailed) as caught:
                model(torch.ones(rows, 2))
            if rank == failure.rank:
                lane = failure.lane if rows == 8 else 0
                assert str(caught.value) == f"step {step}, lane {lane}, layer {failure.layer}", name
            else:
                assert caught.value.rank == failure.rank, name  # type: ignore[attr-defined]
                assert f"rank {failure.rank} failed with BoomError: step {step}" in str(caught.value), name
            # Nothing more runs, in any way, until both ranks have called reset().
            for call in (
                lambda r=rows: model(torch.ones(r, 2)),
                lambda: ubatch.all_reduce(torch.ones(2), group),
                lambda: launch_all_gather(torch.ones(2), group),
            ):
                with promptly(0.1), pytest.raises(GroupBroken, match=r"Boom.*Call reset\(\)"):
                    call()
            assert "BoomError" in str(group.broken)
            with promptly():
                group.reset()
            assert group.broken is None
            healthy_step(model, probe, step := step + 1, rows)
    model.close()


def test_a_failed_lane_fails_the_step_on_every_rank_and_all_recover() -> None:
    run_ranks(fail_and_recover, 2)


def last_segment(rank: int, world_size: int) -> None:
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)
    for rows in (8, 3):
        probe.step, probe.failures = 1, (Failure(rank=1, lane=0, layer=LAYERS),)
        if rank == 1:
            with pytest.raises(BoomError):
                model(torch.ones(rows, 2))
        else:
            assert torch.equal(model(torch.ones(rows, 2)), torch.full((rows, 2), 2.0)), "its own step was complete"
            with promptly(), pytest.raises(PeerFailed, match=r"rank 1 failed with BoomError.*waited for 'vote'"):
                model(torch.ones(rows, 2))
        group.reset()
        healthy_step(model, probe, 2, rows)
    model.close()


def test_a_failure_after_the_last_transfer_is_learnt_at_the_next_vote() -> None:
    run_ranks(last_segment, 2)


def swallowing(rank: int, world_size: int) -> None:
    """User code that catches everything cannot make a step of a broken group look complete."""

    class Swallow(Probe):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(Exception):
                return super().forward(x)
            return x

    group = CommGroup.from_process_group(timeout_s=10.0)
    probe = Swallow(group)
    model = UBatchWrapper(probe, UBatchConfig(dbo_prefill_token_threshold=4, group=group))
    if rank == 0:
        with pytest.raises(BoomError), group.step():
            vote_and_fail(group)
    else:
        with pytest.raises(GroupBroken, match="BoomError"):
            model(torch.ones(8, 2))
    group.reset()
    healthy_step(model, probe, 2)
    model.close()


def vote_and_fail(group: CommGroup) -> None:
    schedule = UBatchConfig().resolved_schedule()
    prints = {"schedule": ubatch.fingerprint(schedule.describe()), "mode": ubatch.fingerprint("prefill")}
    assert group.vote(ubatch.Offer(ubatch.Wish.YES, (4, 4), 2, **prints)).engaged
    raise BoomError


def test_a_step_whose_error_was_swallowed_is_no_result() -> None:
    run_ranks(swallowing, 2)


# --------------------------------------------------------------------------------------------------- many rounds


def random_rounds(rank: int, world_size: int, seed: int, rounds: int) -> dict[str, int]:
    """Ranks follow one plan of failures; who does not see one at once sees it at its next vote."""
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)
    counts = {"done": 0, "failed": 0, "peer failed": 0}
    step = 0
    while step < rounds:
        step += 1
        plan = random.Random(1000 * seed + step)
        rows = plan.choice([3, 8, 9])
        failures = [
            Failure(other, plan.randrange(2), plan.randint(0, LAYERS), plan.random() < 0.3)
            for other in range(world_size)
            if plan.random() < 0.25 and step < rounds
        ]
        time.sleep(random.Random(f"{seed} {rank} {step}").choice([0.0, 0.0, 0.02]))
        probe.step, probe.failures = step, tuple(failures)
        try:
            with promptly():
                result = model(torch.full((rows, 2), float(step)))
            assert torch.equal(result, torch.full((rows, 2), float(step * world_size)))
            counts["done"] += 1
        except BoomError:
            counts["failed"] += 1
        except PeerFailed as error:
            counts["peer failed"] += error.rank != rank
        else:
            continue
        with promptly():
            group.reset()
        step = int(max(ubatch.all_gather(torch.tensor([step]), group).tolist()))
    model.close()
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_failures_at_random_places(world_size: int) -> None:
    rounds = 40 if world_size == 2 else 20
    results = run_ranks(random_rounds, world_size, 1, rounds)
    for counts in results:
        assert counts["done"] > rounds // 4
    assert sum(counts["failed"] for counts in results) > rounds // 5
    assert sum(counts["peer failed"] for counts in results) > rounds // 5


# --------------------------------------------------------------------------------------------------- late or absent


def slow_and_absent(rank: int, world_size: int) -> None:
    timeout_s = 1.5
    group = CommGroup.from_process_group(timeout_s=timeout_s)
    model, probe = wrap(group)
    store = c10d._get_default_store()

    # Merely slow: several slices of waiting, then it completes, in the vote and in a transfer.
    for rows in (8, 3):
        if rank == 1:
            time.sleep(0.9)
        healthy_step(model, probe, 1, rows)
    if rank == 1:
        time.sleep(0.9)
    assert launch_all_gather(torch.tensor([rank]), group).wait().tolist() == [0, 1]

    # Absent: the one that waits times out, and the other learns that as soon as it comes.
    if rank == 0:
        with lasting(timeout_s), pytest.raises(TransferTimeout, match=r"rank 0 waited for 'vote' longer than 1\.5 s"):
            model(torch.ones(8, 2))
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        with promptly(1.0), pytest.raises(PeerFailed, match=r"rank 0 waited for 'vote' longer than 1\.5 s"):
            model(torch.ones(8, 2))

    # Only one calls reset(): it times out, twice. The other comes between two attempts, and must not count on one
    # that is over.
    if rank == 0:
        for _ in range(2):
            with lasting(timeout_s), pytest.raises(TransferTimeout, match=r"ranks \[1\] of \[0, 1\] did not come"):
                group.reset()
            with pytest.raises(GroupBroken):
                model(torch.ones(8, 2))
        store.set("tried twice", "")
        time.sleep(0.7)
    else:
        store.wait(["tried twice"])
    with promptly():
        group.reset()
    healthy_step(model, probe, 2)
    group.reset()  # no failure: harmless
    healthy_step(model, probe, 3)
    model.close()


def test_slow_ranks_are_waited_for_and_absent_ones_not_for_ever() -> None:
    run_ranks(slow_and_absent, 2)


def reset_waits(rank: int, world_size: int) -> None:
    """A transfer launched before a reset is never mixed up with what comes after it."""
    group = CommGroup.from_process_group(timeout_s=5.0)
    stale = launch_all_gather(torch.tensor([-1.0]), group) if rank == 0 else None
    group.reset()
    assert ubatch.all_gather(torch.tensor([float(rank)]), group).tolist() == [0.0, 1.0]
    if stale is not None:
        with promptly(), pytest.raises(GroupBroken, match=r"reset\(\) was called"):
            stale.wait()
    assert group.broken is None
    assert ubatch.all_gather(torch.tensor([float(rank)]), group).tolist() == [0.0, 1.0]


def test_a_transfer_from_before_a_reset_stays_there() -> None:
    run_ranks(reset_waits, 2)


def taken_for_dead(rank: int, world_size: int) -> None:
    group = CommGroup.from_process_group(timeout_s=5.0)
    if rank == 0:
        group.usable_connection().fail("rank 1 died.", rank=1)
    else:
        with promptly(), pytest.raises(GroupBroken, match=r"the other ranks gave this one up: rank 1 died"):
            ubatch.all_reduce(torch.ones(1), group)
    group.reset()
    assert ubatch.all_reduce(torch.ones(1), group).item() == 2.0


def test_a_rank_that_was_taken_for_dead_is_told() -> None:
    run_ranks(taken_for_dead, 2)


def disagree(rank: int, world_size: int) -> None:
    """Ranks that call different collectives wait for each other; both are told, and both can go on."""
    group = CommGroup.from_process_group(timeout_s=1.0)
    with pytest.raises((TransferTimeout, PeerFailed), match=r"longer than 1\.0 s"):
        (ubatch.all_reduce if rank else ubatch.all_gather)(torch.ones(4), group)
    group.reset()
    assert ubatch.all_reduce(torch.ones(1), group).item() == 2.0


def test_ranks_that_disagree_do_not_hang() -> None:
    run_ranks(disagree, 2)


# --------------------------------------------------------------------------------------------------------- death


def death(rank: int, world_size: int, dead: int, rows: int) -> tuple[int, str, float]:
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)
    healthy_step(model, probe, 1, rows)
    if rank == dead:
        threading.Timer(0.5, os._exit, (9,)).start()
        time.sleep(60)
    begun = time.monotonic()
    with promptly(), pytest.raises(PeerFailed) as caught:
        model(torch.ones(rows, 2))
    noticed = time.monotonic() - begun
    with promptly(), pytest.raises(GroupBroken):
        model(torch.ones(rows, 2))
    return caught.value.rank, str(caught.value), noticed


@pytest.mark.parametrize(("world_size", "dead"), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_a_rank_that_dies_is_named(world_size: int, dead: int) -> None:
    """Rank 0 hosts the rendezvous store, which dies with it."""
    results = run_ranks(death, world_size, dead, 8 if dead else 3, dying=[dead])
    ended = time.monotonic()
    for rank, result in enumerate(results):
        if rank == dead:
            assert result is None
        else:
            assert result[0] == dead
            assert f"rank {dead} died" in result[1]
            assert 0.3 < result[2] < PROMPT_S
    assert time.monotonic() - ended < 1.0


def death_in_mid_step(rank: int, world_size: int) -> str:
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)

    def die(*_: object) -> None:
        if rank == 1 and dbo_current_ubatch_id() == 1:
            os._exit(9)

    probe.exchange = die  # type: ignore[method-assign]
    with promptly(), pytest.raises(PeerFailed, match="rank 1 died, or let go of the group") as caught:
        model(torch.ones(8, 2))
    assert caught.value.rank == 1
    group.timeout_s = 1.0
    with pytest.raises(TransferTimeout, match=r"ranks \[1\]"):
        group.reset()
    return str(caught.value.__notes__)


def test_a_rank_that_dies_in_mid_step_is_named() -> None:
    notes = run_ranks(death_in_mid_step, 2, dying=[1])[0]
    assert "raised in lane" in notes


# ------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupted(rank: int, world_size: int) -> None:
    group = CommGroup.from_process_group(timeout_s=10.0)
    model, probe = wrap(group)
    main = threading.main_thread().ident
    assert main is not None
    for where in ("lane", "vote", "unsplit"):
        rows = 3 if where == "unsplit" else 8
        if rank == 0:
            # It waits for rank 1, which is not in a hurry, and the user is.
            timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            probe.step, probe.failures = 1, ()
            with promptly(), pytest.raises(KeyboardInterrupt):
                model(torch.ones(rows, 2))
            timer.join()
        else:
            if where == "vote":
                time.sleep(1.0)
            else:
                probe.step, probe.failures = 1, ()
                probe.exchange = lambda *_: time.sleep(1.0)  # type: ignore[method-assign]
            with promptly(), pytest.raises(PeerFailed, match="rank 0 failed with KeyboardInterrupt") as caught:
                model(torch.ones(rows, 2))
            assert caught.value.rank == 0
            probe.__dict__.pop("exchange", None)
        group.reset()
        healthy_step(model, probe, 2)
    model.close()


def test_ctrl_c_on_one_rank_ends_its_wait_and_the_others() -> None:
    run_ranks(interrupted, 2)


# --------------------------------------------------------------------------------------------------- several groups


class TwoGroups(nn.Module):
    """Votes on one group, exchanges on another as well."""

    def __init__(self, voting: CommGroup, other: CommGroup) -> None:
        super().__init__()
        self.voting, self.other = voting, other
        self.fail = self.fail_late = False
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise BoomError
        stamps = ubatch.all_gather(torch.full((1,), float(self.step)), self.other)
        assert set(stamps.tolist()) == {float(self.step)}, f"paired with {stamps}"
        if self.fail_late:
            raise BoomError
        return ubatch.all_reduce(x, self.voting)


def several_groups(rank: int, world_size: int) -> None:
    voting, other, apart = (CommGroup.from_process_group(timeout_s=10.0) for _ in range(3))
    module = TwoGroups(voting, other)
    model = UBatchWrapper(module, UBatchConfig(dbo_prefill_token_threshold=4, group=voting))
    for step, (rows, late) in enumerate([(8, False), (3, False), (8, True), (3, True)]):
        # Rank 0 fails without a word on `other`, where rank 1 may be waiting for it, or with a transfer left there.
        module.step, module.fail, module.fail_late = step, rank == 0 and not late, rank == 0 and late
        with promptly(), pytest.raises(BoomError if rank == 0 else PeerFailed, match="Boom" if rank else None):
            model(torch.ones(rows, 2))
        voting.reset()
        with pytest.raises(GroupBroken):  # out of step too, on both ranks, though rank 0 never used it in this step
            ubatch.all_gather(torch.full((1,), -1.0), other)
        other.reset()
        module.step, module.fail, module.fail_late = 100 + step, False, False
        assert torch.equal(model(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
        # What the step did not use goes on, out of step with nobody.
        assert torch.equal(ubatch.all_reduce(torch.ones(1), apart), torch.full((1,), 2.0))
    model.close()


def test_a_group_that_the_step_used_breaks_with_the_one_it_voted_on() -> None:
    run_ranks(several_groups, 2)


def sub_groups(rank: int, world_size: int) -> None:
    # Rank 0 is in more process groups than the others: names must not depend on how many a process has.
    lonely = dist.new_group([0])
    if rank == 0:
        CommGroup.from_process_group(lonely, timeout_s=10.0)
    else:
        with pytest.raises(ubatch.ConfigError, match=f"rank {rank} is not in the process group"):
            CommGroup.from_process_group(lonely, timeout_s=10.0)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
    everybody = CommGroup.from_process_group(timeout_s=10.0)
    mine = [CommGroup.from_process_group(pg, timeout_s=10.0) for pg, left in zip(pairs, (0, 1), strict=True)
            if rank in (left, left + 1)]  # fmt: skip
    for pair in mine:
        assert ubatch.all_gather(torch.tensor([rank]), pair).tolist() == list(pair.ranks)
    assert [pair.rank for pair in mine] == [pair.ranks.index(rank) for pair in mine]

    # A failure in the pair (1, 2) names the global rank, and does not concern rank 0.
    if rank > 0:
        pair = mine[-1]
        if rank == 2:
            with pytest.raises(BoomError), pair.step():
                raise BoomError
        else:
            with promptly(), pytest.raises(PeerFailed) as caught, pair.step():
                ubatch.all_reduce(torch.ones(1), pair)
            assert caught.value.rank == 2
        pair.reset()
        assert ubatch.all_reduce(torch.ones(1), pair).item() == 2.0
    assert ubatch.all_reduce(torch.ones(1), everybody).item() == 3.0

    # A lane may use any group whose ranks all voted.
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for pair in mine:
                x = ubatch.all_reduce(x, pair)
            return x

    config = UBatchConfig(dbo_prefill_token_threshold=4, group=everybody, require_overlap=True)
    model = UBatchWrapper(Pairs(), config)
    assert torch.equal(model(torch.ones(6, 1)), torch.full((6, 1), (2.0, 3.0, 3.0)[rank]))
    model.close()


def test_sub_groups() -> None:
    run_ranks(sub_groups, 3)


# ------------------------------------------------------------------------------------------ without other ranks


def alone(rank: int, world_size: int) -> None:
    group = CommGroup.from_process_group(timeout_s=10.0)
    for own_group in (group, None):
        module = TwoGroups(group, group)
        config = UBatchConfig(dbo_prefill_token_threshold=4, group=own_group)
        model = UBatchWrapper(module, config)
        module.fail = True
        for rows in (8, 3):
            with pytest.raises(BoomError):
                model(torch.ones(rows, 2))
        module.fail = False
        assert torch.equal(model(torch.ones(8, 2)), torch.ones(8, 2)), "usable again at once"
        model.close()
    assert group.broken is None


def test_without_other_ranks_nothing_needs_a_reset() -> None:
    run_ranks(alone, 1)


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


def keeps_nothing(rank: int, world_size: int) -> None:
    """Old process groups go once nothing can be stuck in them any more, and threads with them."""
    group = CommGroup.from_process_group(timeout_s=0.2)
    for _ in range(3):
        group.reset()
    assert len(_kept) == 6
    time.sleep(1.0)
    group.reset()
    assert len(_kept) <= 2


def test_old_process_groups_are_let_go_of() -> None:
    run_ranks(keeps_nothing, 2)
