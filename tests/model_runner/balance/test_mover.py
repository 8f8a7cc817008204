"""Experts move between ranks: layers compute what they did, before, during and after; what fails changes nothing.

On a device with streams, moves and steps are ordered where they touch the same memory; the host waits for none.
"""

import logging
import random
import time
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from fake_streams import FakeStreams, Operation
from torch import Tensor

from model_runner.balance.mover import MoveNews, Mover
from model_runner.balance.slots import ALIGNMENT, SlotStore, pieces_of, room_of, rounds_of, streams_of
from moe import (
    EmulatedLink,
    ExpertMap,
    ExpertPlacement,
    FusedMoEModularKernel,
    experts_backends,
    make_all2all,
    make_experts,
)
from ranks import on_ranks
from ubatch import CommGroup, ConfigError, Offer, PeerFailed, UBatchError, Wish

LAYERS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 2, 16, 24, 2, 20
START = ExpertPlacement.default(LAYERS, 6, 2)


def random_placement(rng: random.Random, experts: int, ranks: int, redundant: int) -> ExpertPlacement:
    """Random experts in the slots that a default placement fills, and every expert somewhere."""
    default = ExpertPlacement.default(LAYERS, experts, ranks, redundant)
    found = default.experts.copy()
    for row in found:
        used = np.flatnonzero(row >= 0)
        chosen = [*range(experts), *(rng.randrange(experts) for _ in range(len(used) - experts))]
        rng.shuffle(chosen)
        row[used] = chosen
    return ExpertPlacement(found, experts, ranks)


class Model:
    """Two MoE layers on a rank whose experts lie as a placement says; and the same on one rank."""

    def __init__(self, group: CommGroup, placement: ExpertPlacement, backend: str = "grouped") -> None:
        draw = torch.Generator().manual_seed(0)
        experts, rank = placement.num_experts, group.rank
        weights = [
            (
                torch.randn(experts, 2 * INTERMEDIATE, HIDDEN, generator=draw) * 0.2,
                torch.randn(experts, HIDDEN, INTERMEDIATE, generator=draw) * 0.2,
            )
            for _ in range(LAYERS)
        ]
        all2all = make_all2all("torch_dist", group=group, num_experts=placement.num_slots)
        alone = make_all2all("local", group=None, num_experts=experts)
        first = rank * placement.slots_per_rank
        self.kernels, self.whole = [], []
        for layer, (w13, w2) in enumerate(weights):
            held = placement.held(layer, rank)
            idle = placement.slots_per_rank - len(held)
            own = [torch.cat((w[held], torch.zeros(idle, *w.shape[1:]))) for w in (w13, w2)]
            self.kernels.append(FusedMoEModularKernel(all2all, make_experts(backend, *own, first)))
            self.whole.append(FusedMoEModularKernel(alone, make_experts("reference", w13, w2)))
        self.group = group

    def check(self, seed: int) -> None:
        """Both compute the same from random tokens."""
        draw = torch.Generator().manual_seed(1000 * seed + self.group.rank)
        experts = self.whole[0].all2all.num_experts
        for kernel, whole in zip(self.kernels, self.whole, strict=True):
            x = torch.randn(TOKENS, HIDDEN, generator=draw)
            ids = torch.rand(TOKENS, experts, generator=draw).topk(TOP_K).indices
            weights = torch.rand(TOKENS, TOP_K, generator=draw)
            with self.group.step(), torch.no_grad():
                torch.testing.assert_close(kernel(x, weights, ids), whole(x, weights, ids))


def vote(group: CommGroup, mover: Mover) -> None:
    with group.step():
        mover.heard(group.vote(Offer(Wish.IDLE, (0,), 1, moving=mover.tell())).moving)
    assert group.same(zlib.crc32(mover.placement.experts.tobytes()))  # the ranks have switched together


def until_over(group: CommGroup, mover: Mover, model: Model | None = None, most: int = 5000) -> list[MoveNews]:
    news: list[MoveNews] = []
    for step in range(most):
        vote(group, mover)
        if model is not None and step % 7 == 0:
            model.check(step)
        news += mover.take_news()
        if any(each.over for each in news):
            return news
        time.sleep(0.001)
    raise AssertionError(f"not over after {most} steps: {news}")


def started(group: CommGroup, seed: int, **how: Any) -> tuple[Model, Mover, random.Random]:
    """Layers in which six experts lie in order, their mover, and what draws other placements."""
    model = Model(group, START)
    return model, Mover(model.kernels, START, group, torch.device("cpu"), **how), random.Random(seed)


def check_moves(group: CommGroup, mover: Mover, model: Model, number: int, wanted: ExpertPlacement) -> None:
    """An order succeeds."""
    mover.begin(number, wanted)
    assert not until_over(group, mover, model)[-1].failure
    assert mover.placement == wanted
    model.check(number)


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_that_changes_comes_from_a_holder(seed: int) -> None:
    rng = random.Random(seed)
    ranks, experts = rng.randrange(1, 6), rng.randrange(6, 14)
    before, after = (random_placement(rng, experts, ranks, seed % 4) for _ in range(2))
    streams = streams_of(before, after, 1)
    each = before.slots_per_rank
    found = before.experts[1].copy()
    for sender in range(ranks):
        for receiver in range(ranks):
            for source, slot in streams[sender][receiver]:
                found[receiver * each + slot] = before.experts[1, sender * each + source]
                here = after.experts[1, receiver * each + slot] in before.held(1, receiver)
                assert (sender == receiver) == here
    assert (found == after.experts[1]).all()

    totals = np.array([[len(stream) * 104 for stream in row] for row in streams])
    budget, sent = 40 * (seed + 1), np.zeros_like(totals)
    for starts, sizes in rounds_of(totals, budget):
        assert (starts == sent).all()
        assert sizes.any()
        others = sizes - np.diag(sizes.diagonal())
        least = ALIGNMENT * (ranks - 1)
        assert max(others.sum(axis=0).max(), others.sum(axis=1).max()) <= max(budget, least)
        assert max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max()) <= room_of(budget, ranks)
        sent += sizes
    assert (sent == totals).all()


def test_pieces_are_cut_where_items_end() -> None:
    assert list(pieces_of(24, 40, 32)) == [(0, 24, 32), (1, 0, 32)]
    assert list(pieces_of(0, 0, 32)) == []


@pytest.mark.parametrize("name", [name for name in experts_backends() if name not in ("flashinfer", "packed")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_is_its_bytes(name: str, dtype: torch.dtype) -> None:
    """Experts whose slots' bytes changed places compute as those that were made so."""
    draw = torch.Generator().manual_seed(0)
    w13 = torch.randn(3, 48, 16, generator=draw).to(dtype)
    w2 = torch.randn(3, 16, 24, generator=draw).to(dtype)
    order = [2, 0, 1]
    try:
        moved, made = make_experts(name, w13.clone(), w2.clone()), make_experts(name, w13[order], w2[order])
    except ConfigError as error:
        pytest.skip(str(error))
    except ImportError:
        pytest.skip("no Triton")
    store = SlotStore([moved])
    copies = [torch.zeros(store.slot_bytes[0], dtype=torch.uint8) for _ in order]
    for slot, copy in enumerate(copies):
        for start in range(0, len(copy), 136):
            store.read(0, slot, start, copy[start : start + 136])
    for slot, source in enumerate(order):
        store.write(0, slot, copies[source])
    for mine, theirs in zip(moved.slot_tensors(), made.slot_tensors(), strict=True):
        assert torch.equal(mine, theirs)


def test_biases_and_scales_move_with_their_weights() -> None:
    w13, w2, b13, b2 = torch.randn(3, 8, 6), torch.randn(3, 6, 4), torch.randn(3, 8), torch.randn(3, 6)
    store = SlotStore([make_experts("grouped", w13, w2, b13=b13, b2=b2)])
    assert store.slot_bytes == [4 * (8 * 6 + 6 * 4 + 8 + 6)]
    with pytest.raises(ConfigError, match="only oneDNN knows"):
        SlotStore([make_experts("packed", torch.randn(2, 8, 4), torch.randn(2, 4, 4))])


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "backend"), [(2, "native"), (2, "grouped"), (4, "grouped")])
@on_ranks()
def test_layers_compute_the_same_while_experts_move(rank: int, group: CommGroup, world_size: int, backend: str) -> None:
    """Random placements one after the other, in small pieces: nothing that a layer gives changes."""
    rng = random.Random(5)
    placement = random_placement(rng, 8, world_size, 4)
    model = Model(group, ExpertPlacement.default(LAYERS, 8, world_size, 4), backend)
    start = ExpertPlacement.default(LAYERS, 8, world_size, 4)
    mover = Mover(model.kernels, start, group, torch.device("cpu"), bytes_per_step=4000)
    go_on, slow = mover._go_on, random.Random(rank)
    mover._go_on = lambda: None if slow.random() < 0.3 else go_on()  # type: ignore[method-assign]
    model.check(0)
    for number in range(1, 6):
        mover.begin(number, placement)
        assert mover.busy
        news = until_over(group, mover, model)
        assert news[-1].over
        assert not news[-1].failure
        assert mover.placement == placement
        assert [layer for each in news for layer in each.layers] == [0, 1]
        model.check(number)
        placement = random_placement(rng, 8, world_size, 4)
    assert not mover.busy


@pytest.mark.ranks
@on_ranks(2)
def test_a_wrong_checksum_leaves_experts_where_they_are(rank: int, group: CommGroup) -> None:
    """A byte that changed on its way: both ranks give the order up, and the next one succeeds."""
    model, mover, rng = started(group, 1, bytes_per_step=3000)
    carrier = mover._carrier
    land, landed = carrier._land, []

    def corrupt(*args: object) -> None:
        landed.append(1)
        if rank == 1 and len(landed) == 2:
            carrier._into[7] ^= 1
        land(*args)  # type: ignore[arg-type]

    carrier._land = corrupt  # type: ignore[method-assign]
    wanted = random_placement(rng, 6, 2, 0)
    mover.begin(1, wanted)
    news = until_over(group, mover, model)
    assert news == [MoveNews(1, over=True, failure="checksum")]
    assert mover.placement == START
    model.check(1)
    while group.least(-float(mover.busy)):  # what was given up ends without a later order
        vote(group, mover)
    check_moves(group, mover, model, 2, wanted)


@pytest.mark.ranks
@on_ranks(2)
def test_no_step_waits_for_a_stalled_move(rank: int, group: CommGroup) -> None:
    """One rank does not send: steps go on, the order is given up in time, and a late rank catches up."""
    model, mover, rng = started(group, 2, bytes_per_step=3000, timeout_s=0.5)
    wanted = random_placement(rng, 6, 2, 0)
    if rank == 0:  # the other one has not received the order yet
        mover.begin(1, wanted)
    longest, begun, news = 0.0, time.monotonic(), []
    while not news and time.monotonic() - begun < 10:
        at = time.monotonic()
        vote(group, mover)
        longest = max(longest, time.monotonic() - at)
        time.sleep(0.002)
        news = mover.take_news()
    assert news == [MoveNews(1, over=True, failure="timeout")]
    assert longest < 0.4
    model.check(1)
    if rank == 1:
        assert not mover.busy
        mover.begin(1, wanted)
    assert mover.busy  # until the exchange that rank 0 has begun is over
    check_moves(group, mover, model, 2, wanted)


@pytest.mark.ranks
@on_ranks(2)
def test_a_lost_channel_is_said_once_and_steps_go_on(rank: int, group: CommGroup) -> None:
    model, mover, rng = started(group, 3, bytes_per_step=3000)
    if rank == 1:

        def fail(*_: object) -> None:
            raise RuntimeError("the other end is gone")

        mover._carrier._channel.launch = fail  # type: ignore[method-assign, assignment]
    with pytest.MonkeyPatch.context() as patch:
        said: list[object] = []
        patch.setattr(logging.getLogger("model_runner.balance.mover"), "error", lambda *words: said.append(words))
        for number in (1, 2):
            mover.begin(number, random_placement(rng, 6, 2, 0))
            assert until_over(group, mover, model) == [MoveNews(number, over=True, failure="transport")]
            assert not mover.busy
    assert len(said) == 1
    assert mover.placement == START
    model.check(1)


@pytest.mark.ranks
@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, group: CommGroup) -> None:
    """Other slots than are filled; and ranks whose layouts differ."""
    start = ExpertPlacement.default(LAYERS, 7, 2)
    model = Model(group, start)
    mover = Mover(model.kernels, start, group, torch.device("cpu"))
    turned = np.roll(start.experts.reshape(LAYERS, 2, -1), 1, axis=1).reshape(LAYERS, -1)
    mover.begin(1, ExpertPlacement(turned, 7, 2))
    assert mover.take_news() == [MoveNews(1, over=True, failure="refused")]
    mover.begin(2, start)
    assert mover.take_news() == [MoveNews(2, over=True)]
    other = Model(group, start, "grouped" if rank == 0 else "reference")
    with pytest.raises(ConfigError, match="different layouts"):
        Mover(other.kernels, start, group, torch.device("cpu"))


@pytest.mark.ranks
@on_ranks(2)
def test_moves_give_way_on_an_emulated_link(rank: int, group: CommGroup) -> None:
    """Over a slow link experts take their bytes' time at least."""
    _, mover, rng = started(group, 4, link=EmulatedLink(0.001, 200e3), bytes_per_step=8000)
    mover.begin(1, random_placement(rng, 6, 2, 0))
    begun = time.monotonic()
    news = until_over(group, mover)
    moved = sum(each.num_bytes for each in news)
    assert moved > 0
    assert time.monotonic() - begun >= moved / 2 / 200e3


@pytest.mark.ranks
@on_ranks(2)
def test_a_step_sends_one_round_in_its_gaps_and_none_before_the_next(rank: int, group: CommGroup) -> None:
    """However many gaps it has; only a step that had none is made up for before the next one."""
    model, mover, rng = started(group, 7, bytes_per_step=1000)
    carrier, wanted = mover._carrier, random_placement(rng, 6, 2, 0)
    mover.begin(1, wanted)
    in_gaps = before_steps = 0
    while mover.busy:
        launched = carrier.launches
        vote(group, mover)
        between, launched = carrier.launches - launched, carrier.launches
        assert between == 0 or not in_gaps
        before_steps += between
        begun = time.monotonic()
        for look in range(1000):  # until it has sent something, and then some
            mover.fill_gap()
            if look > 10 and (carrier.launches > launched or time.monotonic() > begun + 0.1):
                break
            time.sleep(0.0005)
        in_gaps = carrier.launches - launched
        assert in_gaps <= 1
    assert mover.placement == wanted
    assert 2 * before_steps < carrier.launches  # the first; and where a round was late
    model.check(7)


@pytest.mark.ranks
@on_ranks(2)
def test_after_a_failed_step_experts_are_where_they_were(rank: int, group: CommGroup) -> None:
    """Orders under way are dropped with the group's old connection; later ones move experts again."""
    model, mover, rng = started(group, 6, bytes_per_step=1000)
    mover.begin(1, random_placement(rng, 6, 2, 0))
    for _ in range(3):
        vote(group, mover)
    tell = mover.tell
    if rank == 1:
        mover.tell = lambda: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError if rank == 1 else PeerFailed):
        vote(group, mover)
    mover.tell = tell  # type: ignore[method-assign]
    group.reset()
    vote(group, mover)
    assert mover.take_news() == [MoveNews(1, over=True, failure="transport")]
    model.check(1)
    wanted = random_placement(rng, 6, 2, 0)
    check_moves(group, mover, model, 2, wanted)
    if rank == 1:
        mover.placement = START  # as if it had switched alone
    with group.step():
        group.vote(Offer(Wish.IDLE, (0,), 1))
    group.reset()
    with pytest.raises(UBatchError, match="different placements"):
        mover.tell()


# -- on a device with streams ------------------------------------------------------------------------------------------

BEHIND = {"comm": 1, "compute": 40}
"""Steps by which each of the device's streams is behind the host."""


@pytest.mark.ranks
@on_ranks(2)
def test_moves_are_ordered_after_steps_and_steps_after_switches(rank: int, group: CommGroup) -> None:
    streams = FakeStreams()
    _, mover, rng = started(group, 3, streams=streams, bytes_per_step=3000)
    carrier, slots = mover._carrier, mover._slots
    read, write, launch, land = slots.read, slots.write, carrier._channel.launch, carrier._land
    replace, gathered = ExpertMap.replace, list[Operation]()

    def gather(layer: int, slot: int, first: int, into: Tensor) -> None:
        gathered.append(streams.work("gather", reads=[f"weights {layer}"], writes=["out"]))
        read(layer, slot, first, into)

    def send(*args: Any) -> Any:
        assert streams.host.issuperset(gathered), "the host sends what has not arrived on it"
        return launch(*args)

    def landed(*args: Any) -> None:
        streams.work("land", reads=["in"], writes=["staging"])
        land(*args)

    def switch(layer: int, slot: int, source: Tensor) -> None:
        streams.work("switch", reads=["staging"], writes=[f"weights {layer}"])
        write(layer, slot, source)

    def mapped(self: ExpertMap, table: Any) -> None:
        streams.work("map", writes=["map"])
        replace(self, table)

    slots.read, slots.write = gather, switch  # type: ignore[method-assign]
    carrier._channel.launch, carrier._land = send, landed  # type: ignore[method-assign]
    ExpertMap.replace = mapped  # type: ignore[method-assign]
    votes, queued = 0, dict[Operation, int]()
    for number in (1, 2):
        mover.begin(number, random_placement(rng, 6, 2, 0))
        while mover.busy:
            vote(group, mover)
            streams.work("step", reads=["map", *(f"weights {layer}" for layer in range(LAYERS))], writes=["hidden"])
            votes += 1
            queued |= dict.fromkeys(streams.operations[len(queued) :], votes)
            streams.host |= {each for each, when in queued.items() if when <= votes - BEHIND[each.stream.name]}
    assert not streams.races
    assert sum(each.name == "map" for each in streams.operations) == 2 * LAYERS
    on = {each.name: each.stream.name for each in streams.operations}
    assert on == {"gather": "comm", "land": "comm", "switch": "compute", "map": "compute", "step": "compute"}
    assert mover.placement != START
