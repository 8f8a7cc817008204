"""On a device with streams, moves and steps are ordered where they touch the same memory; the host waits for none."""

from typing import Any

import pytest
from fake_streams import FakeStreams, Operation
from test_mover import LAYERS, START, random_placement, started, vote
from torch import Tensor

from moe import ExpertMap
from ranks import on_ranks
from ubatch import CommGroup

pytestmark = pytest.mark.ranks

BEHIND = {"comm": 1, "compute": 40}
"""Steps by which each of the device's streams is behind the host."""


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
