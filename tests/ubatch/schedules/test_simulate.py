"""The ideal machine: published facts about schedules, and agreement with the ring."""

from dataclasses import replace

import pytest
from layer_times import efficiency_of, scaled

from ubatch import SCHEDULES, ConfigError, Point, Recv, Schedule, get_schedule
from ubatch.schedules import Compute, Launch, Op, Pass, Wait, median_programs, programs_of, simulate, simulate_ranks
from ubatch.schedules.lane_program import LayerTimes, RankLoad, UnevenTimes, layer_program, rank_loads
from ubatch.trace.spans import Event, EventKind, LinkTime, SpanKind, Trace

LAYERS = 200
VLLM = get_schedule("mlp_shared_overlap")
SIMULATED = [schedule for schedule in SCHEDULES.values() if not schedule.signalled]


def efficiency(attention: float, experts: float, shared: float, schedule: Schedule) -> float:
    """Of a long model whose whole-batch compute and communication are both 1 a layer."""
    whole = LayerTimes(attn_core=attention, experts=experts, shared=shared, dispatch=0.5, combine=0.5)
    lane = scaled(whole, 1 / schedule.lanes)
    return efficiency_of(simulate([layer_program(lane, LAYERS, schedule)] * schedule.lanes, schedule))


@pytest.mark.parametrize(
    ("attention", "experts", "shared", "schedule", "expected"),
    [
        (0.3, 0.7, 0.0, VLLM, 0.83),
        (0.7, 0.3, 0.0, VLLM, 0.83),
        (0.5, 0.5, 0.0, VLLM, 0.99),
        (0.7, 0.3, 0.0, VLLM.with_lanes(3), 0.96),
        (0.4, 0.4, 0.2, VLLM, 0.95),
        (0.4, 0.4, 0.2, replace(VLLM, recv=Recv.PEER), 0.91),
        (0.3, 0.7, 0.0, replace(VLLM, chunks=2), 0.99),
        (0.3, 0.7, 0.0, replace(VLLM, chunks=2, chunk_dispatch=False), 0.90),
        (0.4, 0.4, 0.2, replace(VLLM, chunks=2), 0.99),
    ],
)
def test_golden_efficiencies(
    attention: float, experts: float, shared: float, schedule: Schedule, expected: float
) -> None:
    assert efficiency(attention, experts, shared, schedule) == pytest.approx(expected, abs=0.012)


def test_one_lane_hides_nothing_but_the_shared_expert() -> None:
    serial = get_schedule("serial")
    times = LayerTimes(attn_core=1.0, experts=2.0, dispatch=3.0, combine=4.0)
    line = simulate([layer_program(times, 5, serial)], serial)
    assert (line.seconds, line.exposed_s) == pytest.approx((5 * 10.0, 5 * 7.0))
    with_shared = simulate([layer_program(replace(times, shared=1.5), 5, serial)], serial)
    assert with_shared.seconds == pytest.approx(5 * 10.0)


def test_times_by_hand() -> None:
    """Two lanes, one transfer each: the second lane's compute hides the first one's transfer, the link queues."""
    program: list[Op] = [Compute(1.0), Launch("t", 4.0), Pass(Point.DISPATCH), Wait("t"), Compute(1.0)]
    line = simulate([program, program], VLLM)
    assert (line.seconds, line.compute_s, line.communication_s, line.exposed_s) == (10.0, 4.0, 8.0, 6.0)
    waits = [(span.lane, span.start, span.end) for span in line.spans if span.kind is SpanKind.WAIT]
    assert waits == [(0, 2.0, 5.0), (1, 6.0, 9.0)]


def test_who_keeps_the_baton_waits_for_itself() -> None:
    """Lane 0 leads through its first point, so it waits there; an inactive point waits as well."""
    program: list[Op] = [Launch("t", 1.0), Pass(Point.DISPATCH), Compute(1.0), Wait("t")]
    for schedule in (replace(VLLM, lead=1), replace(VLLM, points_off=frozenset({Point.DISPATCH}))):
        assert simulate([program, []], schedule).exposed_s == 1.0


def test_the_link_is_full_duplex() -> None:
    sends = [Launch("a", 4.0, 1.0), Launch("b", 1.0, 4.0)]
    program: list[Op] = [*sends, Wait("a"), Compute(0.5), Wait("b")]
    line = simulate([program], Schedule("one", lanes=1))
    # a sends until 4 and receives until 1; b sends from 4 to 5 and receives from 1 to 5.
    assert (line.seconds, line.communication_s) == (5.0, 5.0)  # not the 8 of a link that does one thing at a time
    assert [(span.name, span.start, span.end) for span in line.spans if span.kind is SpanKind.TRANSFER] == [
        ("a", 0.0, 4.0),
        ("b", 1.0, 5.0),
    ]


def test_a_combine_inside_a_projection_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'single_batch_signalled' is signalled: .* Simulate it without signalled"):
        efficiency(0.5, 0.5, 0.0, get_schedule("single_batch_signalled"))


def test_waiting_for_what_was_not_launched_is_refused() -> None:
    with pytest.raises(ConfigError, match="not launched"):
        simulate([[Wait("t")]], get_schedule("serial"))


def test_programs_come_from_a_traced_step() -> None:
    """Lanes one after the other, traced: their stages, in order, are the simulator's program, times included."""
    trace = Trace()
    lane = [
        (EventKind.LAUNCH, "dispatch.0", 1.0, 0.0, LinkTime()),
        (EventKind.POINT, "dispatch", 0.25, 0.0, LinkTime()),
        (EventKind.WAIT, "dispatch.0", 0.0, 0.5, LinkTime(4.0, 3.0)),
        (EventKind.END, "end", 2.0, 0.0, LinkTime()),
    ]
    for number in range(2):
        trace.events += [Event(1, number, kind, name, cpu, wait, link) for kind, name, cpu, wait, link in lane]
    expected: list[Op] = [
        *(Compute(1.0), Launch("dispatch.0", 4.0, 3.0), Compute(0.5)),
        *(Compute(0.25), Pass("dispatch")),
        *(Compute(0.0), Wait("dispatch.0")),
        Compute(2.0),
    ]
    programs = programs_of(trace, 1)
    assert programs == [expected, expected]
    # lane 0 computes 1.75, then lane 1; the link is busy from 1.0 to 9.0; lane 1's last stage ends at 11.0
    assert simulate(programs, VLLM).seconds == 11.0
    with pytest.raises(ConfigError, match="no lane events of step 2"):
        programs_of(trace, 2)


def test_a_later_chunk_is_not_waited_for_at_the_point() -> None:
    """Only what was waited for right behind the point, before another launch, is its receive hook's."""
    trace = Trace()
    lane = [
        *((EventKind.LAUNCH, "dispatch.0"), (EventKind.LAUNCH, "dispatch.1"), (EventKind.POINT, "dispatch")),
        *((EventKind.WAIT, "dispatch.0"), (EventKind.LAUNCH, "combine.2"), (EventKind.WAIT, "dispatch.1")),
        *((EventKind.LAUNCH, "combine.3"), (EventKind.POINT, "combine")),
        *((EventKind.WAIT, "combine.2"), (EventKind.WAIT, "combine.3"), (EventKind.END, "end")),
    ]
    for kind, name in lane:
        link = LinkTime(2.0, 2.0) if kind is EventKind.WAIT else LinkTime()
        cpu = 1.5 if name in ("combine.2", "combine.3") and kind is EventKind.LAUNCH else 0.0
        trace.events.append(Event(1, 0, kind, name, cpu, 0.0, link))
    programs = programs_of(trace, 1)
    hooked = {op.key for op in programs[0] if isinstance(op, Launch) and op.hooked}
    assert hooked == {"dispatch.0", "combine.2", "combine.3"}
    # dispatches until 2 and 4; experts 2 to 3.5 and 4 to 5.5; combines 4 to 6, when the link is free, and 6 to 8
    assert simulate(programs, get_schedule("single_batch")).seconds == 8.0


def test_medians_of_measured_programs() -> None:
    def sample(compute: float, link: float) -> list[list[Op]]:
        return [[Compute(compute), Launch("t", link), Pass("dispatch"), Wait("t")]]

    samples = [sample(1.0, 5.0), sample(9.0, 4.0), sample(2.0, 6.0)]
    assert median_programs(samples) == sample(2.0, 5.0)
    with pytest.raises(ConfigError, match="differ"):
        median_programs([sample(1.0, 1.0), [[Compute(1.0), Launch("u", 1.0), Pass("dispatch"), Wait("t")]]])
    with pytest.raises(ConfigError, match="differ"):
        median_programs([[[Pass("dispatch")]], [[Pass("combine")]]])
    with pytest.raises(ConfigError, match="number"):
        median_programs([[[Pass("dispatch")]], [[]]])


def test_ranks_wait_for_each_other_by_hand() -> None:
    """One is slower before the exchange, the other behind it: together they are slower than either alone."""

    def rank(before: float, behind: float, link: float = 1.0) -> list[list[Op]]:
        exchange: list[Op] = [Launch("t", link), Pass("dispatch"), Wait("t")]
        return [[Compute(before), *exchange, Compute(behind), Launch("u", 0.0), Wait("u")]]

    single = get_schedule("single_batch")
    first, second = rank(1.0, 5.0), rank(4.0, 1.0, link=0.5)
    assert [simulate(each, single).seconds for each in (first, second)] == [7.0, 5.5]
    # The first waits for the second's launch at 4, the second for its own link until 4.5, then for the first's "u".
    assert [line.seconds for line in simulate_ranks([first, second], single)] == [9.0, 9.0]
    assert simulate_ranks([first, second], single)[0].exposed_s == 3.0
    assert [line.seconds for line in simulate_ranks([first, first], single)] == [7.0, 7.0]
    with pytest.raises(ConfigError, match="do not launch the same transfers"):
        simulate_ranks([first, [[Compute(1.0)]]], single)
    twice = [[*first[0], *first[0]]]
    with pytest.raises(ConfigError, match="two transfers of the same key"):
        simulate_ranks([twice, twice], single)


def test_a_rank_that_is_alike_changes_nothing() -> None:
    times = LayerTimes(attn_core=0.3, experts=0.5, shared=0.2, dispatch=0.4, combine=0.6)
    for schedule in (VLLM, VLLM.with_lanes(3), get_schedule("two_batch_decode"), get_schedule("single_batch")):
        programs = [layer_program(times, 6, schedule)] * schedule.lanes
        alone = simulate(programs, schedule, 0.01)
        assert simulate_ranks([programs, programs], schedule, 0.01) == [alone, alone]


def seconds_of_ranks(times: LayerTimes, tokens: list[list[float]], schedule: Schedule) -> float:
    """Of a step in which the experts of each rank get `tokens[layer][rank]`."""
    loads = zip(*map(rank_loads, tokens), strict=True)
    ranks = [[layer_program(times, len(tokens), schedule, own)] * schedule.lanes for own in loads]
    return max(line.seconds for line in simulate_ranks(ranks, schedule))


def test_a_step_lasts_as_long_as_its_busiest_rank() -> None:
    """One lane, by hand: the busiest rank's experts, and both its transfers, take 1.6 times as long."""
    serial, times = get_schedule("serial"), LayerTimes(attn_core=1.0, experts=2.0, dispatch=0.5, combine=0.25)
    assert seconds_of_ranks(times, [[1.0] * 4] * 3, serial) == pytest.approx(3 * 3.75)
    skewed = [[16.0, 8.0, 8.0, 8.0]] * 3
    assert seconds_of_ranks(times, skewed, serial) == pytest.approx(3 * (1.0 + 1.6 * 2.75))
    programs = [[layer_program(times, 3, serial, [load] * 3)] for load in rank_loads(skewed[0])]
    lines = simulate_ranks(programs, serial)
    assert [line.compute_s for line in lines] == pytest.approx([3 * 4.2, *[3 * 2.6] * 3])
    # The busier direction: the busiest rank receives 1.6 dispatches, 0.8 combines; others send 3.2 / 3 and 0.8 of one.
    busy = [1.6 * 0.5 + 0.8 * 0.25, *[3.2 / 3 * 0.5 + 0.8 * 0.25] * 3]
    assert [line.communication_s for line in lines] == pytest.approx([3 * seconds for seconds in busy])


def test_where_the_busiest_rank_differs_by_layer_none_rests() -> None:
    """All ranks compute the same in total, and still every layer waits for its busiest one."""
    times = LayerTimes(attn_core=1.0, experts=2.0, dispatch=0.0, combine=0.0)
    turns = [[16.0, 8.0, 8.0, 8.0], [8.0, 16.0, 8.0, 8.0], [8.0, 8.0, 16.0, 8.0], [8.0, 8.0, 8.0, 16.0]]
    for schedule in SIMULATED:
        lane = scaled(times, 1 / schedule.lanes)
        same = seconds_of_ranks(lane, [turns[0]] * 4, schedule)
        assert same == pytest.approx(4 * (1.0 + 1.6 * 2.0))
        balanced = seconds_of_ranks(lane, [[1.0] * 4] * 4, schedule)
        assert balanced < seconds_of_ranks(lane, turns, schedule) <= same * 1.0001
    assert seconds_of_ranks(times, turns, get_schedule("serial")) == pytest.approx(same)


def test_loads_of_ranks() -> None:
    assert rank_loads([3.0, 1.0]) == [RankLoad(1.5, 1.5, 0.5), RankLoad(0.5, 0.5, 1.5)]
    assert rank_loads([0.0, 0.0, 0.0]) == [RankLoad()] * 3
    times = LayerTimes(attn_core=1.0, experts=2.0, dispatch=0.5, combine=0.25)
    assert layer_program(times, 2, VLLM, [RankLoad()] * 2) == layer_program(times, 2, VLLM)
    for wrong in ([1.0], [1.0, -1.0]):
        with pytest.raises(ConfigError, match="two ranks or more, 0 at least"):
            rank_loads(wrong)
    with pytest.raises(ConfigError, match="at least 0"):
        RankLoad(experts=-1.0)
    with pytest.raises(ConfigError, match="loads of 1 layers were given for 2"):
        layer_program(times, 2, VLLM, [RankLoad()])


def test_uneven_chunks() -> None:
    """A token that travels once: most goes with the first dispatch, and comes home with the last combine."""
    shares = UnevenTimes(
        attn_core=0.4, experts=0.6, dispatch=0.5, combine=0.5, dispatch_shares=(0.74, 0.26), combine_shares=(0.26, 0.74)
    )
    single, two = get_schedule("single_batch"), replace(VLLM, chunks=2)
    launches = [op.seconds for op in layer_program(scaled(shares, 2.0), 1, single) if isinstance(op, Launch)]
    assert launches == pytest.approx([0.74, 0.26, 0.26, 0.74])
    line = simulate([layer_program(shares, 1, single)], single)
    assert line.seconds == pytest.approx(0.4 + 0.37 + 0.6 + 0.37)  # the first dispatch and the last combine are exposed
    half = scaled(shares, 0.5)
    assert efficiency_of(simulate([layer_program(half, LAYERS, two)] * 2, two)) > 0.98
    with pytest.raises(ConfigError, match="dispatch_shares are 2, but the schedule has 1 chunks there"):
        layer_program(shares, 1, replace(single, chunk_dispatch=False))
    with pytest.raises(ConfigError, match="combine_shares must be at least 0 each and 1 together"):
        replace(shares, combine_shares=(0.5, 0.6))
