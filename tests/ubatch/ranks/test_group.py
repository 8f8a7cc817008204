"""The vote: whatever batches ranks have, they split alike, never dead-lock, and every no has a reason."""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import ubatch
from ranks import on_ranks, run_ranks
from ubatch import CommGroup, ConfigError, DeclineReason, Offer, SplitError, UBatchConfig, UBatchWrapper, Wish

pytestmark = pytest.mark.ranks


class Experts(nn.Module):
    """Expert parallelism in small: row `x` belongs to rank `int(x) % ranks`, which multiplies it by its rank + 2."""

    def __init__(self, group: CommGroup, layers: int = 2) -> None:
        super().__init__()
        self.group, self.layers = group, layers
        seen: set[int] = set()
        self.lanes_seen = lambda: seen  # a function is no state of the module

    def forward(self, x: Tensor) -> Tensor:
        self.lanes_seen().add(ubatch.dbo_current_ubatch_id() if ubatch.dbo_enabled() else -1)
        self.check_context(x)
        for _ in range(self.layers):
            x = x + self.experts(x)
        return x

    def check_context(self, x: Tensor) -> None:
        """The forward context tells every rank's tokens in this lane, or in the whole call."""
        context = ubatch.get_forward_context()
        rows = ubatch.all_gather(torch.tensor([x.shape[0]]), self.group).tolist()
        assert (context.tokens_across_ranks, context.num_tokens) == (tuple(rows), x.shape[0])
        assert context.decision.engaged == ubatch.dbo_enabled()

    def experts(self, x: Tensor) -> Tensor:
        group = self.group
        owner = x[:, 0].long() % group.size
        order = torch.argsort(owner, stable=True)
        sent = torch.bincount(owner, minlength=group.size)
        received = ubatch.all_to_all_single(sent, group).tolist()
        mine = ubatch.all_to_all_single(x[order], group, received, sent.tolist()) * (group.rank + 2)
        returned = ubatch.all_to_all_single(mine, group, sent.tolist(), received)
        return torch.empty_like(x).index_copy_(0, order, returned)

    @staticmethod
    def reference(x: Tensor, size: int, layers: int = 2) -> Tensor:
        for _ in range(layers):
            x = x + x * (x[:, :1].long() % size + 2)
        return x


def rows_of(rank: int, call: int) -> int:
    """Random batch sizes, differently seeded on every rank: idle, below the threshold of 6, above it."""
    return random.Random(f"{rank} {call}").choice([0, 0, 1, 2, 5, 6, 7, 9, 16])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("world_size", "lanes"), [(2, 2), (2, 3), (3, 2)])
@on_ranks()
def test_ranks_with_different_batches_split_alike_and_are_right(
    rank: int, group: CommGroup, world_size: int, lanes: int
) -> None:
    module = Experts(group)
    config = UBatchConfig(verify="off", num_ubatches=lanes, dbo_prefill_token_threshold=6, group=group)
    model = UBatchWrapper(module, config)
    generator = torch.Generator().manual_seed(rank)
    expected_engaged = 0
    with torch.inference_mode():
        for call in range(60):
            rows = [rows_of(other, call) for other in range(world_size)]
            busy = [count for count in rows if count]
            engages = bool(busy) and min(busy) >= 6
            expected_engaged += engages
            x = torch.randint(0, 50, (rows[rank], 3), generator=generator).float()
            module.lanes_seen().clear()
            assert torch.equal(model(x), Experts.reference(x, world_size)), (call, rows)
            assert module.lanes_seen() == (set(range(lanes)) if engages else {-1}), (call, rows)
    statistics_ = model.statistics()
    assert statistics_.engaged == expected_engaged
    assert statistics_.engaged + sum(statistics_.declined.values()) == 60
    assert expected_engaged > 5, "an idle rank must not veto"
    reasons = [DeclineReason.PEER_DECLINED, DeclineReason.BELOW_PREFILL_THRESHOLD]
    seen = ubatch.all_reduce(torch.tensor([statistics_.declined.get(reason, 0) for reason in reasons]), group)
    assert min(seen.tolist()) > 0


# ------------------------------------------------------------------------------------------------- every reason


class Rowwise(nn.Module):
    """One collective per call, so that ranks that split differently would dead-lock; any argument, row by row."""

    def __init__(self, group: CommGroup, change: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.group, self.change = group, change

    def forward(self, input_ids: Tensor, other: object = None) -> Any:
        ubatch.all_reduce(torch.ones(1), self.group)
        return self.change(input_ids * 2)


class Opaque:
    """An argument that nobody knows how to split."""


def ids(rows: int, length: int = 4) -> Tensor:
    return torch.arange(rows * length).view(rows, length)


@on_ranks(2)
def test_every_reason_that_ranks_can_have_is_seen(rank: int, group: CommGroup) -> None:
    config = UBatchConfig(verify="off", dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8, group=group)
    module, reason = Rowwise(group), DeclineReason

    def call(expected: str, config: UBatchConfig, *args: Any, module: nn.Module = module, times: int = 1) -> None:
        model = UBatchWrapper(module, config)
        for _ in range(times):
            result = model(*args)
            if isinstance(result, Tensor) and result.dim() > 1:
                assert torch.equal(result, args[0] * 2)
        counted = model.statistics()
        assert sorted(counted.declined) + ["engaged"] * counted.engaged == [expected]

    def on_rank_1(expected: str, *mine: Any, all_see_it: bool = False) -> None:
        """Rank 0 calls with what is usual, rank 1 with what is given."""
        usual = (config, ids(8))
        call(expected if rank or all_see_it else reason.PEER_DECLINED, *(mine if rank == 1 else usual))

    call("engaged", config, ids(8))
    on_rank_1(reason.BELOW_PREFILL_THRESHOLD, config, ids(2, 3))
    small = reason.BELOW_DECODE_THRESHOLD if rank else reason.PEER_DECLINED
    call(small, config, ids(3 if rank == 1 else 8, 1))
    on_rank_1(reason.LAST_UBATCH_EMPTY, config, ids(1, 12))
    call(reason.ALL_IDLE, config, ids(0))
    on_rank_1(reason.DISABLED, replace(config, enable_dbo=False), ids(8))
    on_rank_1(reason.SERIAL_SCHEDULE, replace(config, schedule="serial"), ids(8))
    on_rank_1(reason.LANES_DIFFER, replace(config, num_ubatches=3), ids(8), all_see_it=True)
    on_rank_1(reason.SCHEDULES_DIFFER, replace(config, schedule="two_batch_decode"), ids(8), all_see_it=True)
    on_rank_1(reason.MODES_DIFFER, config, ids(8, 1), all_see_it=True)
    on_rank_1(reason.AMBIGUOUS_ARGUMENT, config, ids(8), ids(8))
    on_rank_1(reason.NO_SPLITTER, config, ids(8), Opaque())
    planned = ubatch.ForwardContext(attn_metadata=object(), num_tokens=32)
    with ubatch.set_forward_context(planned if rank == 1 else None):
        call(reason.NOT_REQUESTED if rank else reason.PEER_DECLINED, config, ids(8))
    # An idle rank takes part in whatever the others do.
    for idle in ((config, ids(0)), (config, ids(0, 1)), (replace(config, num_ubatches=3), ids(0))):
        on_rank_1("engaged", *idle, all_see_it=True)
    # What only the outputs can tell is found out in a proof, together, and remembered.
    first = replace(config, verify="first")
    call(reason.ZERO_DIM_OUTPUT, first, ids(8), module=Rowwise(group, lambda y: y.float().mean()), times=2)
    call(reason.CANNOT_MERGE, first, ids(8), module=Rowwise(group, lambda y: y.sum(0)), times=2)


# ---------------------------------------------------------------------------------------------- details of voting


@on_ranks(2, timeout_s=5.0)
def test_voting(rank: int, group: CommGroup) -> None:
    config = UBatchConfig(verify="off", dbo_prefill_token_threshold=8, group=group)
    no = Offer(Wish.NO, (1,), 2, DeclineReason.DISABLED)

    # Small calls vote as well: what rank 0 calls, rank 1 answers vote by vote.
    model = UBatchWrapper(nn.Identity(), config)
    for _ in range(3):
        if rank == 0:
            assert model(torch.ones(2, 2)).shape == (2, 2)
        else:
            decision = group.vote(no)
            assert decision.tokens == ((2,), (1,))
            assert (decision.reason, decision.declined_by) == (DeclineReason.DISABLED, 0)

    # The result of a vote that the caller held itself is used, not held again.
    slices = (ubatch.UBatchSlice(slice(0, 4), slice(0, 4)), ubatch.UBatchSlice(slice(4, 8), slice(4, 8)))
    yes = Offer(Wish.YES, (4, 4), 2, None, ubatch.fingerprint("s"), ubatch.fingerprint("m"))
    module = Experts(group, layers=1)
    model = UBatchWrapper(module, config)
    for offer, engages in ((yes, True), (no if rank else yes, False)):
        decision = group.vote(offer)
        assert decision.engaged == engages
        cut: dict[str, Any] = {"ubatch_slices": slices} if engages else {"tokens_across_ranks": (8, 8)}
        context = ubatch.ForwardContext(num_tokens=8, mode=ubatch.ForwardMode.PREFILL, decision=decision, **cut)
        x = torch.arange(8.0).repeat(2, 1).T.contiguous()
        with ubatch.set_forward_context(context):
            assert torch.equal(model(x), Experts.reference(x, 2, layers=1))
    assert model.statistics().engaged == 1

    # Overlap that is required and declined is an error on every rank, and leaves nothing out of step.
    model = UBatchWrapper(nn.Identity(), replace(config, require_overlap=True))
    for _ in range(2):
        with pytest.raises(ubatch.OverlapDeclined) as declined:
            model(torch.ones(8 if rank else 2, 2))
        assert declined.value.reason == (DeclineReason.PEER_DECLINED if rank else DeclineReason.BELOW_PREFILL_THRESHOLD)
    assert torch.equal(model(torch.ones(8, 2)), torch.ones(8, 2))

    # Outputs that one rank can merge and another cannot, unlike in their proof: no rank repeats the step alone.
    rows_only = [True]
    rowwise = Rowwise(group, lambda y: y if rank or rows_only[0] else y.sum())
    model = UBatchWrapper(rowwise, replace(config, verify="first"))
    model(ids(8))
    rows_only[0] = False
    if rank == 0:
        with pytest.raises(SplitError, match=r"ranks \[0\] could not merge .*cannot_merge"):
            model(ids(8))
    else:
        model(ids(8))
        with pytest.raises(SplitError, match=r"ranks \[0\] could not merge .*output_dims"):
            model(ids(8))
    group.reset()
    assert group.vote(yes).engaged

    # A default device, a grad mode or an autocast around it is none of the vote's business.
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert group.vote(yes).tokens == ((4, 4), (4, 4))
    big = replace(yes, tokens=(2**40, rank))
    assert group.vote(big).tokens == ((2**40, 0), (2**40, 1))


def making(rank: int, world_size: int) -> None:
    for timeout_s in (0.0, -1.0):
        with pytest.raises(ConfigError, match="timeout_s must be positive"):
            CommGroup.from_process_group(timeout_s=timeout_s)
    # Not every rank comes; then every rank does, whatever happened before.
    if rank == 0:
        with pytest.raises(ubatch.TransferTimeout, match=r"ranks \[1\] of \[0, 1\] did not come within 0.5 s"):
            CommGroup.from_process_group(timeout_s=0.5)
        c10d._get_default_store().set("gave up", "")
    else:
        c10d._get_default_store().wait(["gave up"])
    groups = [CommGroup.from_process_group(timeout_s=5.0) for _ in range(2)]
    # Two groups of the same ranks have nothing to do with each other: these launch in different orders.
    order = (0, 1) if rank == 0 else (1, 0)
    transfers = {n: ubatch.launch_all_gather(torch.tensor([10 * n + rank]), groups[n]) for n in order}
    assert [transfers[n].wait().tolist() for n in (0, 1)] == [[0, 1], [10, 11]]


def test_making_groups() -> None:
    with pytest.raises(ConfigError, match=r"Call torch.distributed.init_process_group first"):
        CommGroup.from_process_group()
    with pytest.raises(ConfigError, match="group must be a CommGroup, not str"):
        UBatchConfig(verify="off", group="world")  # type: ignore[arg-type]
    run_ranks(making, 2)


@on_ranks(2)
def test_a_vote_is_cheap(rank: int, group: CommGroup) -> None:
    """A fraction of a millisecond; the bound only catches votes that all wait for a slice or sleep between looks."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    offer = Offer(Wish.YES, (512, 512), 2)
    taken = []
    for _ in range(250):
        begun = time.perf_counter()
        group.vote(offer)
        taken.append(time.perf_counter() - begun)
    assert min(taken[50:]) < 0.05


# ------------------------------------------------------------------------------------------------ the job's own group

BOUND = torch.device("cuda:0")


@pytest.fixture
def job() -> Iterator[dist.ProcessGroup]:
    """A job of one rank, bound to a device as NCCL's are that are made with `device_id`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default = c10d._get_default_group()
    default.bound_device_id = BOUND
    try:
        yield default
    finally:
        default.bound_device_id = None
        dist.destroy_process_group()


def test_a_group_is_not_split_off_a_job_that_is_bound_to_a_device(
    job: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    split: list[dist.ProcessGroup] = []
    monkeypatch.setattr(c10d, "_get_split_source", split.append)
    group = CommGroup.from_process_group(timeout_s=5.0)
    assert split == [], "NCCL would wait for every rank of the job"
    assert group.usable_connection().pg.bound_device_id is None
    assert job.bound_device_id == BOUND, "the job's own is as it was"
