"""Every rule of the diagnosis: what it says, with which numbers, and when it says nothing."""

from collections.abc import Mapping, Sequence

import pytest

from serving.workbench.tracing.diagnosis import diagnose
from serving.workbench.tracing.inside import Finding, FindingKind
from serving.workbench.tracing.steps import StepRecord, between_steps, compare, group_steps, read_steps, size_class
from ubatch import DeclineReason, Span, SpanKind, StepNote, TraceSummary
from ubatch.trace.export import Clock
from ubatch.trace.file import RankTrace

MS = 1e-3
BELOW = "below_decode_threshold"


def step(
    tokens: int,
    call_ms: float,
    *,
    reason: str | None = None,
    mode: str = "decode",
    compute: float | None = None,
    communication: float = 0.0,
    hidden: float = 0.0,
    waits: Mapping[str, float] | None = None,
    handoff: float = 0.0,
    idle: float = 0.0,
    lanes: Sequence[float] = (),
    ranks: Sequence[float] = (),
) -> StepRecord:
    """A step; times in milliseconds. Its spans fill the call, if `idle` is 0; it computes unless told otherwise."""
    waits = waits or {}
    exposed = sum(waits.values())
    wall = call_ms - idle
    compute = wall - exposed - handoff if compute is None else compute
    summary = TraceSummary(*(x * MS for x in (compute, communication, hidden, exposed, wall, handoff, 0.0)))
    return StepRecord(
        step=1,
        mode=mode,
        schedule="mlp_shared_overlap",
        tokens=tokens,
        lanes=1 if reason else 2,
        chunks=1,
        reason=reason,
        call_s=call_ms * MS,
        summary=summary,
        waits_s={name: time * MS for name, time in waits.items()},
        sent=frozenset({"dispatch", "combine"}),
        handoffs=10.0,
        lane_compute_s=tuple(time * MS for time in lanes),
        rank_compute_s=tuple(time * MS for time in ranks),
    )


def said(steps: Sequence[StepRecord], start: str, serial: Sequence[StepRecord] = ()) -> Finding:
    """The one finding that begins so."""
    (finding,) = (finding for finding in diagnose(steps, serial=serial) if finding.text.startswith(start))
    return finding


def unsaid(steps: Sequence[StepRecord], words: str) -> bool:
    return not any(words in finding.text for finding in diagnose(steps))


SENDS = {"communication": 4.0, "hidden": 4.0}

# ------------------------------------------------------------------------------------------------ sizes, thresholds


def test_small_steps_that_lose_against_unsplit_ones() -> None:
    overlapped = [step(32 + i, 11.2, **SENDS) for i in range(5)] + [step(128, 8.0, **SENDS)] * 5
    unsplit = [step(34, 10.0, reason="peer_declined")] * 5 + [step(130, 10.0, reason="peer_declined")] * 5
    finding = said(overlapped + unsplit, "decode steps below 64 tokens lose 12%")
    assert finding.kind is FindingKind.PROBLEM
    assert finding.text == (
        "decode steps below 64 tokens lose 12% (median of 5 steps, 11.20 ms, against 5 serial steps of 34 tokens, "
        "10.00 ms): raise --dbo-decode-token-threshold to 64."
    )
    assert finding.figures == {"threshold": 64, "change": pytest.approx(0.12), "steps": 5}
    gain = said(overlapped + unsplit, "decode steps of 128-255 tokens gain 20%")
    assert gain.kind is FindingKind.GOOD


def test_without_serial_steps_of_like_size_nothing_is_called_a_gain_and_they_are_asked_for() -> None:
    """Its own compute and communication, one after the other, make this step look 48% faster; serial ones were."""
    looks_good = [step(12, 10.4, compute=12.0, communication=8.0)] * 4
    far = [step(2000, 10.0, reason="peer_declined")] * 4 + [step(12, 6.8, mode="prefill", reason="peer_declined")] * 4
    finding = said(looks_good + far, "whether overlap gains for decode steps of 8-15 tokens is not known: 4 overlapped")
    assert finding.kind is FindingKind.HINT
    assert "0 serial steps of that size were measured" in finding.text
    assert "Run once without --enable-dbo, and give its trace.json with --serial." in finding.text
    assert unsaid(looks_good + far, "gain 4")
    assert unsaid(looks_good + far, "lose")
    serial = [step(9, 6.8, reason="disabled")] * 4
    finding = said(looks_good, "decode steps lose 53% at every size seen, up to 15 tokens", serial)
    assert "against 4 serial steps of 9 tokens, 6.80 ms" in finding.text
    assert not any("is not known" in each.text for each in diagnose(looks_good, serial=serial))


def test_only_serial_steps_of_the_other_trace_are_compared_with() -> None:
    overlapped = [step(12, 10.0)] * 3
    serial = [step(12, 20.0, reason="disabled")] * 3 + [step(12, 1.0)] * 9
    assert said(overlapped, "decode steps of 8-15 tokens gain 50%", serial).kind is FindingKind.GOOD


def test_of_the_serial_steps_in_a_class_the_nearest_in_size_count() -> None:
    overlapped = [step(120, 15.0)] * 3
    serial = [step(70, 10.0, reason="disabled")] * 9 + [step(110, 20.0, reason="disabled")] * 3
    assert said(overlapped, "decode steps of 64-127 tokens gain 25%", serial)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("mixed", "--dbo-prefill-token-threshold"), ("target_verify", "the token_threshold of verify (YAML)")],
)
def test_every_mode_has_its_threshold(mode: str, name: str) -> None:
    serial = [step(64, 12.0, mode=mode, reason="disabled")] * 3
    finding = said([step(64, 20.0, mode=mode)] * 3, f"{mode} steps lose 67%", serial)
    assert f"raise {name} above 127" in finding.text


def test_large_steps_that_lose_are_no_matter_of_the_threshold() -> None:
    sizes = {64: 9.0, 256: 11.0}
    steps = [step(size, ms) for size, ms in sizes.items() for _ in range(3)]
    steps += [step(size, 10.0, reason="kv_order") for size in sizes for _ in range(3)]
    assert "`ubatch tune`" in said(steps, "decode steps of 256-511 tokens lose 10%").text
    assert unsaid(steps, "raise")


def test_modes_and_few_steps_are_not_thrown_together() -> None:
    steps = [step(64, 20.0)] * 2 + [step(64, 10.0, reason="kv_order")] * 5
    assert [each.measured for each in compare(steps)] == [False]
    steps = [step(64, 20.0, mode="prefill", compute=20.0)] * 5 + [step(64, 10.0, reason="kv_order")] * 5
    (comparison,) = compare(steps)
    assert (comparison.mode, comparison.measured) == ("prefill", False)
    assert [size_class(tokens) for tokens in (1, 2, 3, 64, 127, 128)] == [1, 2, 2, 64, 64, 128]


def test_overlap_that_is_off() -> None:
    steps = [step(64, 10.0, reason="disabled", waits={"dispatch": 3.0, "combine": 1.0})] * 4
    finding = said(steps, "overlap is off, and 4 steps waited for communication 40% of their time")
    assert finding.figures["could_gain"] == pytest.approx(0.4)
    assert unsaid([step(64, 10.0, reason="disabled")] * 4, "overlap is off")


def test_steps_below_the_threshold_that_wait() -> None:
    waiting = [step(tokens, 10.0, reason=BELOW, waits={"dispatch": 3.0}) for tokens in (8, 9, 15)]
    finding = said(waiting, "3 decode steps of 8 to 15 tokens ran unsplit")
    assert "a lower --dbo-decode-token-threshold could gain up to 30%" in finding.text
    losing = [step(32, 20.0)] * 3 + [step(32, 10.0, reason="kv_order")] * 3
    assert unsaid(waiting + losing, "a lower"), "larger ones lose already"
    assert unsaid([step(1, 10.0, reason=BELOW, waits={"dispatch": 3.0})] * 5, "a lower"), "nothing to split"
    assert unsaid([step(8, 10.0, reason=BELOW, waits={"counts": 3.0})] * 5, "a lower"), "no link to hide"


@pytest.mark.parametrize("reason", list(DeclineReason))
def test_frequent_reasons_come_with_advice(reason: DeclineReason) -> None:
    steps = [step(64, 10.0, reason=reason)] * 3 + [step(64, 10.0)] * 7
    explained = (DeclineReason.DISABLED, DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.BELOW_PREFILL_THRESHOLD)
    if reason in explained:
        assert unsaid(steps, "because of")
        return
    finding = said(steps, f"3 of 10 decode steps (30%) ran unsplit because of {reason}: ")
    assert finding.kind is FindingKind.HINT
    assert reason is not DeclineReason.NO_GAIN_EXPECTED or "a threshold that is given overlaps them" in finding.text
    assert unsaid([*steps, *[step(64, 10.0)] * 30], "because of"), "rare"


def test_steps_of_one_token_are_named_as_what_they_are() -> None:
    steps = [step(1, 10.0, reason=BELOW, waits={"dispatch": 3.0})] * 5
    finding = said(steps, "5 decode steps had one token on a rank, which cannot be split")
    assert finding.kind is FindingKind.FACT
    assert unsaid(steps, "threshold"), "no threshold changes that"
    assert [group.outcome for group in group_steps(steps)] == ["unsplit (one token cannot be split)"]
    off = [step(1, 10.0, reason="disabled")] * 5
    assert said(off, "no decode step overlapped: 5 of 5 (100%) ran unsplit because of disabled: --enable-dbo")


@pytest.mark.parametrize("reason", list(DeclineReason))
def test_why_nothing_overlapped_is_always_said(reason: DeclineReason) -> None:
    """Also of a single step, without waits, and whether or not times were measured."""
    steps = [step(3, 10.0, reason=reason)]
    start = f"no decode step overlapped: 1 of 1 (100%) ran unsplit because of {reason}: "
    assert said(steps, start)
    assert any(finding.text.startswith(start) for finding in diagnose(steps, measures=False))
    rest = [step(700, 10.0, mode="prefill")] * 5
    assert said(steps + rest, start), "another mode did overlap"


def test_below_the_threshold_says_which_and_how_far() -> None:
    steps = [step(tokens, 10.0, reason=BELOW) for tokens in (3, 7)]
    text = said(steps, "no decode step overlapped: 2 of 2").text
    assert "they had 3 to 7 tokens; send more requests at a time, or lower --dbo-decode-token-threshold" in text


# ------------------------------------------------------------------------------------------- inside overlapped steps


def test_nothing_to_hide() -> None:
    assert said([step(64, 10.0)] * 3, "3 steps overlapped, but nothing travelled").kind is FindingKind.PROBLEM
    assert unsaid([step(64, 10.0, **SENDS)] * 3, "nothing travelled")


def test_a_link_that_is_the_limit_and_a_schedule_that_is_not_good() -> None:
    slow = [step(64, 20.0, compute=8.0, communication=16.0, hidden=4.0, waits={"combine": 9.0, "dispatch": 3.0})] * 3
    finding = said(slow, "overlapped steps wait for the link 60% of their time, 75% of it for combine: the link is the")
    assert "16.00 ms of communication against 8.00 ms of compute" in finding.text
    assert "No schedule hides more than 50% of it; now it is 25%" in finding.text
    bad = [step(64, 20.0, compute=16.0, communication=8.0, hidden=4.0, waits={"combine": 4.0})] * 3
    assert "another schedule" in said(bad, "overlapped steps wait for the link 20% of their time").text
    assert unsaid([step(64, 20.0, **SENDS, waits={"combine": 1.0})] * 3, "wait for the link")


def test_waits_for_the_other_ranks() -> None:
    steps = [step(64, 10.0, **SENDS, waits={"dispatch_counts": 2.5})] * 3
    assert "dispatch_counts" in said(steps, "overlapped steps wait 25% of their time for a few bytes").text
    assert unsaid(steps, "wait for the link")


def test_slow_hand_offs() -> None:
    steps = [step(64, 10.0, **SENDS, handoff=0.8)] * 3
    finding = said(steps, "hand-offs take 8% of overlapped steps: 10 in a step, 80 us each")
    assert finding.figures["each_s"] == pytest.approx(80e-6)
    assert unsaid([step(64, 10.0, **SENDS, handoff=0.1)] * 3, "hand-offs take")


def test_time_around_the_lanes() -> None:
    assert "2.00 ms of each" in said([step(64, 10.0, **SENDS, idle=2.0)] * 3, "20% of overlapped steps").text
    assert unsaid([step(64, 10.0, **SENDS, idle=0.5)] * 3, "of overlapped steps (")


def test_uneven_lanes_and_ranks() -> None:
    steps = [step(64, 10.0, **SENDS, lanes=(6.0, 2.0), ranks=(4.0, 4.0))] * 3
    assert "6.00 against 4.00 ms" in said(steps, "lane 0 computes 1.50x as long").text
    assert unsaid(steps, "rank 0 computes")
    steps = [step(64, 10.0, **SENDS, lanes=(4.0, 4.0), ranks=(2.0, 2.0, 5.0))] * 3
    assert said(steps, "rank 2 computes 1.67x as long").kind is FindingKind.HINT


# ------------------------------------------------------------------------------------------------------- all together


def test_problems_come_first_after_the_census() -> None:
    steps = [step(64, 20.0, **SENDS)] * 3 + [step(64, 12.0, reason="kv_order")] * 3
    kinds = [finding.kind for finding in diagnose(steps, between=[(10.0, 4.0), (10.0, 3.0)])]
    assert kinds[0] is FindingKind.FACT
    assert kinds[1:] == sorted(kinds[1:], key=list(FindingKind).index)
    assert FindingKind.PROBLEM in kinds
    last = diagnose(steps, between=[(10.0, 4.0), (10.0, 3.0)])[-1]
    assert last.text.startswith("30% of the recording passed between steps")


def test_without_steps_and_without_times() -> None:
    (finding,) = diagnose([])
    assert finding.text.startswith("no step was recorded")
    steps = [step(64, 20.0)] * 5 + [step(64, 10.0, reason="kv_order")] * 5
    texts = [finding.text for finding in diagnose(steps, measures=False)]
    assert "cannot show what overlap gained" in texts[1]
    assert "because of kv_order" in texts[2]
    assert len(texts) == 3, "nothing that needs times"


def recorded(rank: int, *notes: StepNote, spans: Sequence[Span] = ()) -> RankTrace:
    return RankTrace(rank, tuple(spans), notes, Clock("here", 0.0))


def test_the_rank_that_said_no_says_what_the_step_was() -> None:
    decode = StepNote(1, "decode", 4, "s", reason="peer_declined", declined_by=1, start=1.0, end=2.0)
    prefill = StepNote(1, "mixed", 9, "s", reason="below_prefill_threshold", declined_by=1, start=1.0, end=4.0)
    (one,) = read_steps([recorded(0, decode), recorded(1, prefill)])
    assert (one.mode, one.tokens, one.reason, one.call_s) == ("mixed", 9, "below_prefill_threshold", 2.0)


def test_of_those_that_agree_the_one_with_the_fewest_tokens_counts_and_idle_ranks_do_not() -> None:
    notes = [StepNote(1, "decode", tokens, "s", lanes=2, start=1.0, end=2.0) for tokens in (64, 0, 40)]
    idle = StepNote(2, "prefill", 0, "s", reason="all_idle")
    (one,) = read_steps([recorded(rank, note, idle) for rank, note in enumerate(notes)])
    assert (one.tokens, one.lanes, one.overlapped) == (40, 2, True)


def test_a_step_is_the_mean_of_its_ranks() -> None:
    compute, wait, transfer = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.TRANSFER
    spans = [
        Span(compute, "dispatch", 0, 0.0, 2.0, 1),
        Span(compute, "end", 1, 3.0, 4.0, 1),
        Span(wait, "counts", 0, 4.0, 5.0, 1),
        Span(wait, "dispatch", 0, 5.0, 8.0, 1),
        Span(transfer, "dispatch", 0, 2.0, 8.0, 1),
    ]
    note = StepNote(1, "decode", 4, "s", lanes=2, start=0.0, end=9.0)
    (one,) = read_steps([recorded(0, note, spans=spans), recorded(1, note)])
    assert one.summary == TraceSummary(1.5, 3.0, 0.5, 2.0, 4.0, 0.5, 0.0)
    assert (one.link_wait_s, one.meeting_s, one.handoffs) == (1.5, 0.5, 0.5)
    assert (one.lane_compute_s, one.rank_compute_s) == ((1.0, 0.5), (3.0, 0.0))
    assert between_steps(recorded(0, note, StepNote(2, "decode", 4, "s", start=10.0, end=12.0))) == (12.0, 1.0)


def test_groups_are_modes_and_outcomes() -> None:
    steps = [
        step(8, 1.0, reason=BELOW),
        step(9, 3.0, reason=BELOW),
        step(64, 2.0, **SENDS),
        step(700, 4.0, mode="mixed"),
    ]
    groups = [(group.mode, group.outcome, group.steps, group.tokens) for group in group_steps(steps)]
    assert groups == [
        ("decode", "2 lanes", 1, (64, 64)),
        ("decode", f"unsplit ({BELOW})", 2, (8, 9)),
        ("mixed", "2 lanes", 1, (700, 700)),
    ]
    (everything,) = group_steps(steps, key=lambda _: ("", "all"))
    assert (everything.steps, everything.total.wall_s) == (4, pytest.approx(10 * MS))
