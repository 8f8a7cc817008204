"""What every named schedule promises. A new entry of `SCHEDULES` is checked by being there.

Each check takes a schedule by its name, as users do, and fails by an assertion or by the error that users would get.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from lanes import CPU, lane_pool, walker
from layer_times import bound_of

from serving.options import read_serve_command, to_engine_options
from serving.options.flags.server_flags import Overlap
from ubatch import UBatchConfig, interleave, tracing
from ubatch.lanes.workers import SingleLane
from ubatch.schedules import Launch, LayerTimes, Pass, Wait, layer_program, simulate
from ubatch.schedules.schedule import SCHEDULES, Point, Schedule, SharedExpert, check_runnable, get_schedule

LAYERS = 3
LAYER = [*map(str, Point), "mine", "user"]
"""Every known point, and two that no schedule knows."""
SERVE = ("examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo")
TIMES = LayerTimes(attn_core=1.0, experts=1.3, dispatch=0.7, combine=0.4, attn_prepare=0.2, shared=0.3, attn_gather=0.1)

Order = list[tuple[int, str]]


def variants(name: str) -> Iterator[Schedule]:
    """The schedule with every number of lanes that it may have."""
    schedule = get_schedule(name)
    yield from map(schedule.with_lanes, (2, 3, 4) if schedule.lanes > 1 else (1,))


def real_order(schedule: Schedule) -> Order:
    """What lanes that pass every point do, on their own threads."""
    bodies = [walker(LAYER * LAYERS)] * schedule.lanes
    with tracing() as trace:
        if schedule.lanes == 1:
            SingleLane(CPU).run(bodies, schedule, [None])
        else:
            with lane_pool(schedule.lanes) as pool:
                pool.run(bodies, schedule, [None] * schedule.lanes)
    return trace.order


def the_order_is_foretold(name: str) -> None:
    """The list of (lane, point) is the ring's, twice, in the runtime and in the simulator."""
    for schedule in variants(name):
        active = [point for point in LAYER if schedule.active(point)]
        assert set(LAYER) - set(active) == set(schedule.points_off), schedule.describe()
        expected = interleave([active * LAYERS] * schedule.lanes, lead=schedule.lead)
        assert real_order(schedule) == real_order(schedule) == expected, schedule.describe()
        for lead in range(5):
            own = replace(schedule, lead=lead, signalled=False)
            programs = [layer_program(TIMES, layers, own) for layers in range(1, own.lanes + 1)]
            passed = [
                [str(op.point) for op in each if isinstance(op, Pass) and own.active(op.point)] for each in programs
            ]
            assert simulate(programs, own).order == interleave(passed, lead=lead), own.describe()


def all_lanes_pass_alike(name: str) -> None:
    """Every lane passes every point equally often, which collectives need; ranks can check that before they start."""
    for schedule in variants(name):
        check_runnable(schedule)
        counts = [
            Counter(point for lane, point in real_order(schedule) if lane == own) for own in range(schedule.lanes)
        ]
        assert all(each == counts[0] for each in counts), schedule.describe()


def lane_0_leads(name: str) -> None:
    """It keeps the baton through `lead` active points, and no longer; then lanes take turns."""
    for schedule in variants(name):
        lanes = [lane for lane, _ in real_order(schedule)]
        turns = lanes[schedule.lead :][: 2 * schedule.lanes]
        assert lanes[: schedule.lead] == [0] * schedule.lead, schedule.describe()
        assert turns == [*range(schedule.lanes)] * 2, schedule.describe()


def chunks_are_launched(name: str) -> None:
    """A combine per chunk, and a dispatch per chunk or one for all; each is waited for once."""
    for schedule in variants(name):
        for chunks in (1, 2, 3):
            own = replace(schedule, chunks=chunks, signalled=False)
            program = layer_program(TIMES, 1, own)
            launched = [op.key for op in program if isinstance(op, Launch)]
            kinds = Counter(key.partition(".")[0] for key in launched)
            assert (kinds["combine"], kinds["dispatch"]) == (chunks, chunks if own.chunk_dispatch else 1), (
                own.describe()
            )
            assert sorted(op.key for op in program if isinstance(op, Wait)) == sorted(launched), own.describe()


def the_time_lies_between_the_bounds(name: str) -> None:
    """No faster than its compute or its link, and no slower than all of it one after the other."""
    for own, place, times in product(variants(name), SharedExpert, (TIMES, replace(TIMES, dispatch=4.0))):
        schedule = replace(own, shared_expert=place, signalled=False)  # a combine inside a projection is not simulated
        line = simulate([layer_program(times, LAYERS, schedule)] * schedule.lanes, schedule)
        slowest = line.compute_s + line.communication_s
        assert bound_of(line) <= line.seconds * (1 + 1e-9) <= slowest * (1 + 2e-9), schedule.describe()
        assert line.compute_s == pytest.approx(schedule.lanes * LAYERS * TIMES.compute_s)


def settings_know_it(name: str) -> None:
    """By its name in a file and on the command line; its own mapping makes the same schedule."""
    schedule = get_schedule(name)
    assert Schedule.from_mapping(name, schedule.to_mapping()) == schedule
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dbo.yaml")
        file.write_text(f"schedule: {name}\n", encoding="utf-8")
        assert UBatchConfig.from_yaml(file).resolved_schedule() == schedule
    options = to_engine_options(read_serve_command("ubatch serve", "", [*SERVE, "--schedule", name]).settings)
    assert options.dbo.resolved_schedule() == schedule


def it_is_documented(name: str) -> None:
    """`ubatch serve --help` names it; ranks tell it from all others by a line."""
    help_ = Overlap.model_fields["schedule"].description
    assert name in (help_ or "").replace(",", " ").split()
    lines = [schedule.describe() for schedule in SCHEDULES.values()]
    assert lines.count(get_schedule(name).describe()) == 1
    assert get_schedule(name).name == name


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        the_order_is_foretold,
        all_lanes_pass_alike,
        lane_0_leads,
        chunks_are_launched,
        the_time_lies_between_the_bounds,
        settings_know_it,
        it_is_documented,
    )
}
