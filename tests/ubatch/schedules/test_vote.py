"""The vote as a pure function: offers, decisions, and the encoding of an offer."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ubatch import ConfigError, Decision, DeclineReason, Offer, SplitError, Wish, decide, fingerprint
from ubatch.schedules.vote import MAX_LANES, OFFER_WIDTH, TOLD_WIDTH, decode_offer, encode_offer

DECODE, PREFILL = fingerprint("decode"), fingerprint("prefill")
YES = Offer(Wish.YES, (3, 4), 2, schedule=fingerprint("a"), mode=PREFILL)
IDLE = Offer(Wish.IDLE, (0, 0), 2, schedule=fingerprint("a"), mode=DECODE)
NO = Offer(Wish.NO, (5,), 2, DeclineReason.BELOW_PREFILL_THRESHOLD, fingerprint("a"), PREFILL)
BY_WISH = {Wish.YES: YES, Wish.IDLE: IDLE, Wish.NO: NO}


@pytest.mark.parametrize("wishes", list(itertools.product(Wish, repeat=3)), ids=lambda ws: "-".join(w.name for w in ws))
def test_truth_table(wishes: tuple[Wish, ...]) -> None:
    decision = decide([BY_WISH[wish] for wish in wishes])
    assert decision.engaged == (Wish.NO not in wishes and Wish.YES in wishes)
    if Wish.NO in wishes:
        assert decision.declined_by == wishes.index(Wish.NO)
    elif Wish.YES not in wishes:
        assert decision == Decision(False, DeclineReason.ALL_IDLE, None, ((0,), (0,), (0,)), 0, (IDLE.mode,) * 3)


def test_every_lane_and_rank_is_told_when_it_engages() -> None:
    decision = decide([YES, IDLE, replace(YES, tokens=(1, 0))])
    modes = YES.mode, IDLE.mode, YES.mode
    assert decision == Decision(True, None, None, ((3, 4), (0, 0), (1, 0)), 0, modes, YES.schedule)
    assert (decision.num_lanes, decision.common_mode) == (2, YES.mode)
    assert [decision.lane_tokens(lane) for lane in range(2)] == [(3, 0, 1), (4, 0, 0)]


def test_what_ranks_tell_reaches_all_of_them_and_decides_nothing() -> None:
    told = decide([replace(YES, told=(1, -2)), IDLE])
    assert (told.told, told) == (((1, -2), ()), decide([YES, IDLE]))


def test_one_no_is_a_no_for_all_and_each_rank_sees_its_own_reason() -> None:
    other_no = replace(NO, reason=DeclineReason.DISABLED)
    offers = [YES, NO, IDLE, other_no]
    seen, peer = [decide(offers, rank) for rank in range(4)], DeclineReason.PEER_DECLINED
    assert [decision.reason for decision in seen] == [peer, NO.reason, peer, DeclineReason.DISABLED]
    for decision in seen:
        assert not decision.engaged
        assert decision.declined_by == 1, "the first rank that said no"
        assert decision.tokens == ((7,), (5,), (0,), (5,)), "unsplit: every rank's whole count"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(YES, lanes=3, tokens=(1, 1, 1)), DeclineReason.LANES_DIFFER),
        (replace(YES, schedule=fingerprint("b")), DeclineReason.SCHEDULES_DIFFER),
        (replace(YES, mode=DECODE), DeclineReason.MODES_DIFFER),
        (replace(YES, mode=DECODE, lanes=3, tokens=(1, 1, 1), schedule=fingerprint("b")), DeclineReason.MODES_DIFFER),
        (replace(NO, lanes=3), DeclineReason.PEER_DECLINED),
    ],
)
def test_ranks_that_would_split_differently_do_not_split(other: Offer, reason: DeclineReason) -> None:
    for offers in ([YES, other], [other, YES]):
        decision = decide(offers, offers.index(YES))
        assert (decision.engaged, decision.reason) == (False, reason)
        assert all(len(row) == 1 for row in decision.tokens)


@pytest.mark.parametrize(
    "idle",
    [
        replace(IDLE, lanes=3, tokens=(0, 0, 0), schedule=fingerprint("b")),
        replace(IDLE, lanes=1, tokens=(0,), schedule=fingerprint("b")),
    ],
)
def test_an_idle_rank_takes_the_lanes_and_the_schedule_of_the_others(idle: Offer) -> None:
    """Modes may have schedules of their own, and it does not know theirs when it votes."""
    for offers in ([YES, idle], [idle, YES]):
        decision = decide(offers)
        assert decision.engaged
        assert sorted(decision.tokens) == [(0, 0), (3, 4)]
        assert (decision.schedule, decision.common_mode) == (YES.schedule, YES.mode)


def test_one_lane_can_be_agreed_on() -> None:
    single = replace(YES, lanes=1, tokens=(7,))
    decision = decide([single, IDLE, replace(single, tokens=(2,))])
    assert (decision.engaged, decision.num_lanes, decision.tokens) == (True, 1, ((7,), (0,), (2,)))
    assert decide([single, YES]).reason is DeclineReason.LANES_DIFFER


@pytest.mark.parametrize(
    ("graph_modes", "agreed"),
    [
        (((YES, 5), (YES, 5)), 5),
        (((YES, 5), (NO, 5)), 5),
        (((YES, 5), (YES, 6)), 0),
        (((YES, 5), (YES, 0)), 0),
        (((YES, 5), (IDLE, 6)), 5),
        (((YES, 5), (IDLE, 0)), 0),
        (((IDLE, 5), (IDLE, 5)), 0),
    ],
)
def test_a_graph_is_replayed_by_all_ranks_or_none_and_overlap_does_not_depend_on_it(
    graph_modes: tuple[tuple[Offer, int], ...], agreed: int
) -> None:
    offers = [replace(offer, graph_mode=mode) for offer, mode in graph_modes]
    for voters in (offers, offers[::-1]):
        voted = [decode_offer(encode_offer(offer)) for offer in voters]
        decision = decide(voted)
        assert decision.graph_mode == agreed
        assert decision.engaged == decide([replace(offer, graph_mode=0) for offer in voters]).engaged
        assert decision.modes == tuple(offer.mode for offer in voters)


def test_every_reason_can_be_voted_and_read_back() -> None:
    for reason in DeclineReason:
        decision = decide([decode_offer(encode_offer(replace(NO, reason=reason))), YES])
        assert (decision.reason, decision.declined_by) == (reason, 0)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    wish, lanes = draw(st.sampled_from(Wish)), draw(st.integers(1, MAX_LANES))
    entries = 1 if wish is Wish.NO else lanes
    most = 0 if wish is Wish.IDLE else 2**40
    print_ = st.integers(0, 2**32 - 1)
    return Offer(
        wish,
        tuple(draw(st.lists(st.integers(0, most), min_size=entries, max_size=entries))),
        lanes,
        draw(st.sampled_from(DeclineReason)) if wish is Wish.NO else None,
        draw(print_),
        draw(print_),
        draw(print_),
        draw(st.booleans()),
        prefill_tokens=draw(st.integers(0, 2**40)),
        period_us=draw(st.integers(0, 2**40)),
        moving=draw(st.integers(0, 2**62)),
        told=tuple(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=TOLD_WIDTH))),
    )


@given(offers())
def test_an_offer_survives_the_trip(offer: Offer) -> None:
    row = encode_offer(offer)
    assert len(row) == OFFER_WIDTH
    assert all(-(2**63) <= value < 2**63 for value in row), "an int64 must hold it"
    assert decode_offer(row) == offer


@given(st.lists(offers(), min_size=1, max_size=4), st.booleans())
def test_all_ranks_reach_the_same_answer(made: list[Offer], again: bool) -> None:
    made = [replace(offer, again=again) for offer in made]
    seen = [decide(made, rank) for rank in range(len(made))]
    assert len({(decision.engaged, decision.declined_by, decision.tokens) for decision in seen}) == 1
    assert all((decision.reason is None) == decision.engaged for decision in seen)
    assert [sum(row) for row in seen[0].tokens] == [sum(offer.tokens) for offer in made]
    assert all(decision.moving == tuple(offer.moving for offer in made) for decision in seen)


def test_a_step_is_repeated_by_all_ranks_or_by_none() -> None:
    repeat = replace(NO, reason=DeclineReason.CANNOT_MERGE, again=True)
    assert decide([repeat, repeat], 1).reason is DeclineReason.CANNOT_MERGE
    for made in ([YES, repeat], [repeat, NO], [IDLE, repeat]):
        with pytest.raises(SplitError, match=r"ranks \[\d\] could not merge.*cannot_merge.*output_dims"):
            decide(made)


@pytest.mark.parametrize(
    "arguments",
    [
        {"wish": Wish.YES, "tokens": (1,), "lanes": 2},
        {"wish": Wish.NO, "tokens": (1, 2), "lanes": 2, "reason": DeclineReason.DISABLED},
        {"wish": Wish.NO, "tokens": (1,), "lanes": 2},
        {"wish": Wish.YES, "tokens": (1, 1), "lanes": 2, "reason": DeclineReason.DISABLED},
        {"wish": Wish.IDLE, "tokens": (0, 1), "lanes": 2},
        {"wish": Wish.YES, "tokens": (1, -1), "lanes": 2},
        {"wish": Wish.YES, "tokens": (1,) * 9, "lanes": 9},
        {"wish": Wish.NO, "tokens": (1,), "lanes": 0, "reason": DeclineReason.DISABLED},
        {"wish": Wish.YES, "tokens": (1, 1), "lanes": 2, "told": (0,) * (TOLD_WIDTH + 1)},
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Offer(**arguments)  # type: ignore[arg-type]


def test_fingerprints_are_the_same_in_every_process() -> None:
    assert fingerprint("mlp_shared_overlap") == 0xA0BE9275
    assert fingerprint("a") != fingerprint("b")
