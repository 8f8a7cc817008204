"""Failure of one rank: what the other ranks report, and how all of them recover."""

import random
import statistics
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from peer_failure_cases import GROUP_TIMEOUT_S, LAYERS, BoomError, Failure, Probe, healthy_step, promptly, wrap
from torch import Tensor, nn

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, GroupBroken, PeerFailed, UBatchConfig, UBatchWrapper, all_reduce

pytestmark = pytest.mark.ranks

# ---------------------------------------------------------------------------------------------- a lane, then the ranks

PLACES = {
    "mid-layer": Failure(rank=0, lane=1, layer=2),
    "mid-layer, with a transfer in the air": Failure(rank=0, lane=1, layer=2, launched=True),
    "before the first transfer, after the vote": Failure(rank=0, lane=0, layer=0),
    "on the other rank": Failure(rank=1, lane=0, layer=3),
}


@on_ranks(2, timeout_s=GROUP_TIMEOUT_S)
def test_a_failed_lane_fails_the_step_on_every_rank_and_all_recover(rank: int, group: CommGroup) -> None:
    model, probe = wrap(group)
    step = 0
    taken: list[float] = []
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
                lambda: ubatch.launch_all_gather(torch.ones(2), group),
            ):
                begun = time.monotonic()
                with pytest.raises(GroupBroken, match=r"Boom.*Call reset\(\)"):
                    call()
                taken.append(time.monotonic() - begun)
            assert "BoomError" in str(group.broken)
            with promptly():
                group.reset()
            assert group.broken is None
            healthy_step(model, probe, step := step + 1, rows)
    assert statistics.median(taken) < 0.1, "none of them waits for anybody"


@on_ranks(2, timeout_s=GROUP_TIMEOUT_S)
def test_a_failure_after_the_last_transfer_is_learnt_at_the_next_vote(rank: int, group: CommGroup) -> None:
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


@on_ranks(2, timeout_s=GROUP_TIMEOUT_S)
def test_a_step_whose_error_was_swallowed_is_no_result(rank: int, group: CommGroup) -> None:
    """User code that catches everything cannot make a step of a broken group look complete."""

    class Swallow(Probe):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(Exception):
                return super().forward(x)
            return x

    probe = Swallow(group)
    model = UBatchWrapper(probe, UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=group))
    if rank == 0:
        schedule = UBatchConfig().resolved_schedule()
        prints = {"schedule": ubatch.fingerprint(schedule.describe()), "mode": ubatch.fingerprint("prefill")}

        def votes_and_fails() -> None:
            with group.step():
                assert group.vote(ubatch.Offer(ubatch.Wish.YES, (4, 4), 2, **prints)).engaged
                raise BoomError

        with pytest.raises(BoomError):
            votes_and_fails()
    else:
        with pytest.raises(GroupBroken, match="BoomError"):
            model(torch.ones(8, 2))
    group.reset()
    healthy_step(model, probe, 2)


# --------------------------------------------------------------------------------------------------- many rounds


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize(("world_size", "rounds"), [(2, 40), (3, 20)])
@on_ranks(timeout_s=GROUP_TIMEOUT_S)
def test_many_failures_at_random_places(rank: int, group: CommGroup, world_size: int, rounds: int) -> None:
    """Ranks follow one plan of failures; who does not see one at once sees it at its next vote."""
    model, probe = wrap(group)
    counts = {"done": 0, "failed": 0, "peer failed": 0}
    step = 0
    while step < rounds:
        step += 1
        plan = random.Random(1000 + step)
        rows = plan.choice([3, 8, 9])
        failures = [
            Failure(other, plan.randrange(2), plan.randint(0, LAYERS), plan.random() < 0.3)
            for other in range(world_size)
            if plan.random() < 0.25 and step < rounds
        ]
        time.sleep(random.Random(f"1 {rank} {step}").choice([0.0, 0.0, 0.02]))
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
    assert counts["done"] > rounds // 4
    failed, peer_failed = ubatch.all_reduce(torch.tensor([counts["failed"], counts["peer failed"]]), group).tolist()
    assert min(failed, peer_failed) > rounds // 5


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


@pytest.mark.wide
@on_ranks(2, timeout_s=GROUP_TIMEOUT_S)
def test_a_group_that_the_step_used_breaks_with_the_one_it_voted_on(rank: int, voting: CommGroup) -> None:
    other, apart = (CommGroup.from_process_group(timeout_s=GROUP_TIMEOUT_S) for _ in range(2))
    module = TwoGroups(voting, other)
    model = UBatchWrapper(module, UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=voting))
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


@on_ranks(3, timeout_s=GROUP_TIMEOUT_S)
def test_sub_groups(rank: int, everybody: CommGroup) -> None:
    # Rank 0 is in more process groups than the others: names must not depend on how many a process has.
    lonely = dist.new_group([0])
    if rank == 0:
        CommGroup.from_process_group(lonely, timeout_s=GROUP_TIMEOUT_S)
    else:
        with pytest.raises(ubatch.ConfigError, match=f"rank {rank} is not in the process group"):
            CommGroup.from_process_group(lonely, timeout_s=GROUP_TIMEOUT_S)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
    mine = [CommGroup.from_process_group(pg, timeout_s=GROUP_TIMEOUT_S) for pg, left in zip(pairs, (0, 1), strict=True)
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

    config = UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=everybody, require_overlap=True)
    model = UBatchWrapper(Pairs(), config)
    assert torch.equal(model(torch.ones(6, 1)), torch.full((6, 1), (2.0, 3.0, 3.0)[rank]))


# ------------------------------------------------------------------------------------------ without other ranks


@on_ranks(1, timeout_s=GROUP_TIMEOUT_S)
def test_without_other_ranks_nothing_needs_a_reset(rank: int, group: CommGroup) -> None:
    for own_group in (group, None):
        module = TwoGroups(group, group)
        config = UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=own_group)
        model = UBatchWrapper(module, config)
        module.fail = True
        for rows in (8, 3):
            with pytest.raises(BoomError):
                model(torch.ones(rows, 2))
        module.fail = False
        assert torch.equal(model(torch.ones(8, 2)), torch.ones(8, 2)), "usable again at once"
    assert group.broken is None


@on_ranks(1)
def test_a_group_of_one_is_reset_as_often_as_needed(rank: int, group: CommGroup) -> None:
    for _ in range(2):
        group.usable_connection().fail("the test says so.")
        with pytest.raises(GroupBroken, match="the test says so"):
            all_reduce(torch.ones(2), group)
        group.reset()
        assert all_reduce(torch.ones(2), group).tolist() == [1.0, 1.0]
