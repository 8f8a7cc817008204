"""What `--enable-dbo` decides: the policy on a simulated machine, over loads and links."""

import math
import random

import pytest
from served_policy import BOTH, DECODES, LAG, LINKS, NOISE, Served, overlapping, serial, serve, told, true_seconds

from model_runner.auto import dbo_policy
from model_runner.auto.dbo_policy import Level, Policy, Seen, SizeTimes
from model_runner.auto.step_stages import Stages
from serving.workbench.arms.cells import SERIAL_ARM, CostTable, Setting, choose
from ubatch import ConfigError


@pytest.mark.long
@pytest.mark.parametrize("link", LINKS)
def test_never_below_serial_and_close_to_the_better_way_of_every_step(link: float) -> None:
    for seed in range(2):
        served = serve(link, seed)
        found = served.policy
        assert served.against(serial) >= 0.99, found
        assert served.against() >= 0.97, found
        if link >= 1:
            assert served.against(serial) > 1.1  # it does overlap
        if link == 0:
            assert found.trials == 0  # nothing to hide, so nothing is tried


@pytest.mark.long
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("spread", [NOISE, 3 * NOISE])
def test_over_five_hundred_steps_it_is_not_below_serial(link: float, spread: float) -> None:
    """Its trials included."""
    for seed in range(6):
        assert serve(link, seed, spread, 500).against(serial) >= 0.98


@pytest.mark.parametrize("link", LINKS)
def test_a_new_load_is_right_within_twenty_steps(link: float) -> None:
    """Of one kind and size; after that, and over 500 steps with all trials."""
    for tokens in (16, 100, 256):
        served = Served(Policy(BOTH), link, seed=tokens)
        served.decodes(tokens, 500)
        assert served.against(first=20) >= 0.97, (tokens, served.policy.reasons)
        assert served.against(serial) >= 0.985


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.0), (0.0, 2.0), (0.5, 4.0), (4.0, 0.5)])
def test_a_link_that_changes_is_noticed_within_twenty_steps(before: float, after: float) -> None:
    served = Served(Policy(BOTH), before)
    for step in range(600):
        if step == 300:
            served.link = after
        served.step("decode", 200)
    own = Served(Policy(BOTH), after, steps=served.steps[320:], seconds=served.seconds[320:])
    assert own.against() >= 0.97, served.policy.reasons


PREFILLS = ("prefill", (512, 2048, 2036, 2039, 2043))
FEW_DECODES = ("decode", (16, 16, 16, 9, 5, 1))


@pytest.mark.parametrize("load", [PREFILLS, FEW_DECODES], ids=["prefill", "decode"])
@pytest.mark.parametrize(("before", "after"), [(1, 5), (0, 5), (5, 1), (2, 8), (2, 0.3), (5, 0), (0, 0.6)])
def test_no_size_is_compared_with_the_link_before(
    load: tuple[str, tuple[int, ...]], before: float, after: float
) -> None:
    """What one size told of the old link kept the others serial on the new one, for the rest of a run."""
    kind, sizes = load
    served = Served(Policy(BOTH), before, spread=0.03)
    for step in range(160):
        served.link = before if step < 40 else after
        served.step(kind, sizes[step % len(sizes)])
    own = Served(Policy(BOTH), after, steps=served.steps[60:], seconds=served.seconds[60:])
    assert own.against() >= 0.97, served.policy.reasons


def test_what_one_size_told_of_a_new_link_sends_the_others_through_a_serial_step() -> None:
    """All that was told of the old one is forgotten, but how time grows with tokens, which only several sizes tell."""
    served = Served(Policy(DECODES), 2.0, spread=0.0)
    for step in range(100):
        served.step("decode", (16, 200)[step % 2])
    slope = served.policy.kinds["decode"].known_slope()
    assert 0.0 < slope < 0.6
    assert overlapping(served) == {16: True, 256: True}
    served.link = 5.0
    served.decodes(200, 20)
    assert (overlapping(served), served.policy.kinds["decode"].known_slope()) == ({256: True}, slope)
    assert served.decodes(16, 7) == [True, False, False, *[True] * 4]


def test_a_slower_link_is_seen_in_two_serial_steps() -> None:
    """One alone may be a stall."""
    served, ways = Served(Policy(DECODES), 0.0, spread=0.0), []
    for step in range(60):
        served.scale = 3.0 if step == 40 else 1.0
        served.link = 4.0 if step >= 50 else 0.0
        ways.append(served.step("decode", 20_000))  # its steps are long, so each is timed
    assert ways.index(True) == 53


@pytest.mark.parametrize("link", [0.0, 1.0])
def test_a_noisy_machine_does_not_mislead_it(link: float) -> None:
    """Step times that scatter by 15%, as next to other work."""
    for seed in range(2):
        served = serve(link, seed, 3 * NOISE)
        assert served.against(serial) >= 0.98
        assert served.against() >= 0.94


@pytest.mark.parametrize("scale", [0.6, 0.8, 1.2, 1.7])
@pytest.mark.parametrize("link", [0.0, 0.2, 0.3, 2.0])
def test_a_machine_that_slows_down_is_not_taken_for_lanes_that_do(link: float, scale: float) -> None:
    """Other work takes its share of serial and overlapped steps alike, for a while."""
    served = Served(Policy(DECODES), link)
    for step in range(600):
        served.scale = scale if step // 100 % 2 else 1.0
        served.step("decode", 64)
    for change in range(100, 600, 100):
        assert served.against(first=change + 10) >= 0.97, served.policy.reasons
    assert served.against(first=20) >= 0.97


@pytest.mark.parametrize("disturbed", [10, 40])
def test_a_serial_time_that_other_work_disturbed_is_measured_again(disturbed: int) -> None:
    """As lanes were faster than that, they ran for hundreds of steps."""
    served = Served(Policy(DECODES), 0.3)
    assert 1.05 < true_seconds("decode", 64, True, 0.3) / true_seconds("decode", 64, False, 0.3) < 1.15
    ways = []
    for step in range(300):
        served.scale = 1.4 if step < disturbed and not served.policy.overlaps("decode", 64) else 1.0
        ways.append(served.step("decode", 64))
    assert True in ways[:disturbed]
    assert ways[disturbed + 60 :].count(False) >= 0.95 * len(ways[disturbed + 60 :])


@pytest.mark.parametrize("disturbed", [4, 40])
def test_lanes_that_other_work_disturbed_are_tried_again(disturbed: int) -> None:
    served = Served(Policy(DECODES), 1.0, spread=0.01)
    ways = [served.step("decode", 64, slow=3.0 if 100 <= step < 100 + disturbed else 1.0) for step in range(500)]
    assert ways[80:100].count(True) >= 19
    assert False in ways[100:120]
    assert ways[400:].count(True) >= 95


def test_what_trials_tell_again_is_believed_longer_until_the_link_changes() -> None:
    """Lanes that lose more than the simulator can know: a trial now and then would cost a percent for ever."""
    served = Served(Policy(DECODES), 1.0, spread=0.03)
    ways = [served.step("decode", 64, slow=1.6) for _ in range(1000)]
    assert sum(ways[:500]) >= 4
    assert sum(ways[500:]) <= 3
    served.link = 6.0
    ways = served.decodes(64, 40)
    assert sum(ways[20:]) >= 18


def test_lanes_whose_times_are_of_two_sorts_are_not_tried_for_ever() -> None:
    """Every trial is far from the mean of those before, once above and once below: as much told again as new."""
    served, ways = Served(Policy(DECODES), 0.5, spread=0.02), [False]
    for _ in range(600):
        ways.append(served.step("decode", 64, slow=2.2 if sum(ways) % 2 else 1.4))
    assert 4 <= sum(ways) <= 16


@pytest.mark.parametrize("stall", [20.0, 1000.0])
def test_a_stall_of_a_trial_does_not_forbid_the_next_for_thousands_of_steps(stall: float) -> None:
    """On a GPU, where only trials tell: the second overlapped step is the first that counts."""
    served, ways = Served(Policy(DECODES), 2.0, spread=0.02, blind=True, lag=LAG + 4), [False]
    for _ in range(1500):
        tries = served.policy.overlaps("decode", 64) and sum(ways) == 1
        ways.append(served.step("decode", 64, slow=stall if tries else 1.0))
    assert sum(ways[-500:]) >= 450


def test_what_one_rank_knows_of_its_size_alone_does_not_keep_all_ranks_serial() -> None:
    """Lanes lost with 128 tokens on each. Then one rank has 100 and three have 10: all decide as 32, their mean."""
    policies = [Policy(DECODES) for _ in range(4)]
    pending: list[list[tuple[Seen, Stages] | None]] = [[] for _ in policies]

    def serve(batches: tuple[int, ...], slow: float) -> list[bool]:
        engaged, mean = [], sum(batches) // len(batches)
        for _ in range(400):
            votes = [policy.overlaps("decode", tokens) for policy, tokens in zip(policies, batches, strict=True)]
            stages = told("decode", mean, all(votes), 2.0, slow if all(votes) else 1.0)
            for policy, own in zip(policies, pending, strict=True):
                if own and (arrived := own.pop(0)) is not None:
                    policy.learn(*arrived)
                step = policy.saw("decode", mean, all(votes))
                own.append(step and (step, stages))
            engaged.append(all(votes))
        return engaged

    assert serve((128,) * 4, 2.0).count(True) < 20
    assert serve((100, 10, 10, 10), 1.0)[200:].count(True) > 180


@pytest.mark.parametrize("link", [0.0, 1.0, 4.0])
def test_where_only_whole_times_are_known_trials_decide(link: float) -> None:
    """On a GPU the host does not see the transfers, and a step's time is read four steps later."""
    served = serve(link, 0, blind=True)
    assert served.against(serial) >= 0.98
    assert served.against() >= 0.93
    assert served.policy.trials > 2


def test_without_transfers_nothing_is_tried() -> None:
    """As on one rank: lanes have nothing to hide, and it says so."""
    served = Served(Policy(DECODES), 0.0)
    assert set(served.decodes(64, 200)) == {False}
    reasons = served.policy.reasons["decode"]
    assert reasons.startswith("by tokens: 64: serial (5.")
    assert "0% waiting; overlapped 0." in reasons
    assert reasons.endswith("x expected)")


def test_it_says_when_it_has_changed_and_its_reasons_are_made_once() -> None:
    """Every step of a server asks for the reasons."""
    served = Served(Policy(DECODES), 2.0)
    for _ in range(12):
        served.step("decode", 64)
        assert served.policy.reasons is served.policy.reasons
    assert (served.changes, overlapping(served)) == (1, {64: True})
    assert "64: overlapped (" in served.policy.reasons["decode"]


def test_a_size_close_to_a_known_one_runs_serially_until_its_time_is_known() -> None:
    served = Served(Policy(DECODES), 2.0, spread=0.0)
    served.decodes(128, 50)
    trials = served.policy.trials
    ways = served.decodes(256, 6)
    assert ways == [True, True, False, False, True, True]  # the first two are like the steps before them
    assert served.policy.trials == trials


def test_a_trial_weighs_more_than_one_of_many_steps() -> None:
    """Those before it are long ago."""
    young, old = Level(), Level()
    for level in (young, old):
        for _ in range(20):
            level.add(1.0, 0.1)
    young.add(1.3, 0.1)
    old.add(1.3, 0.1, trial=True)
    assert young.value == pytest.approx(1.0 + 0.3 / 16)
    assert old.value == pytest.approx(1.0 + 0.3 / 4)


def test_steps_that_others_decline_are_no_trials() -> None:
    served = Served(Policy(DECODES), 2.0, spread=0.0)
    for step in range(600):
        served.step("decode", 64, declined=step % 5 == 0)
    found = served.policy
    assert found.trials < 30  # of 120 that were declined


def test_sizes_that_lose_do_not_keep_another_from_being_tried() -> None:
    """On a GPU, where only trials tell, decodes ramp up from few requests."""
    served = Served(Policy(DECODES), 2.0, blind=True, lag=LAG + 4)
    for tokens in (2, 4, 8, 16):
        for _ in range(40):
            served.step("decode", tokens, slow=1.8)
    ways = served.decodes(64, 300)
    assert ways[150:].count(True) >= 130


@pytest.mark.parametrize(("mean", "batches"), [(64, (63, 64, 90, 3, 125)), (25, (40, 10)), (32, (100, 10, 10, 10))])
def test_ranks_with_unlike_batches_decide_alike(mean: int, batches: tuple[int, ...]) -> None:
    served = Served(Policy(DECODES), 2.0)
    served.decodes(mean, 50)
    assert all(served.policy.overlaps("decode", tokens) for tokens in batches)


def test_a_step_counts_for_the_size_that_decided_it() -> None:
    """Batches of 500 and 520 tokens in turn: both sizes are timed, and checked by serial steps of their own."""
    served = Served(Policy(DECODES), 2.0, spread=0.0)
    ways = [served.step("decode", 520 if step % 2 else 500) for step in range(400)]
    assert ways[100:].count(True) >= 285


def test_a_first_step_that_warms_up_is_not_believed() -> None:
    """The first overlapped step starts threads: five times as long as the next ones. So much of it counts as lost as a
    serial one takes: a stall of seconds must not forbid trials for hours."""
    served, ways = Served(Policy(DECODES), 2.0, spread=0.0), []
    for step in range(30):
        first = served.policy.overlaps("decode", 64) and True not in ways
        served.scale = 5.0 if first or not step else 1.0
        ways.append(served.step("decode", 64))
    assert ways[-10:].count(True) >= 9


def test_a_first_serial_step_that_warms_up_is_not_believed() -> None:
    """It connects to the peers, which looks like a slow link."""
    served = Served(Policy(DECODES), 8.0, spread=0.0)
    served.step("decode", 64)
    served.link = 0.0
    assert not any(served.decodes(64, 100))


def test_all_ranks_decide_the_same_from_the_same_times() -> None:
    first, second = serve(1.0, 3, steps=300), serve(1.0, 3, steps=300)
    assert first.steps == second.steps


def test_few_times_are_wanted_once_nothing_is_new() -> None:
    """Timing a small step costs as much as it gains."""
    served = Served(Policy(DECODES), 0.0, spread=0.0)
    served.decodes(64, 40)
    assert sum(served.policy.saw("decode", 64, False) is not None for _ in range(40)) == 10
    assert all(served.policy.saw("decode", tokens, False) for tokens in (8, 8, 8, 8))


def test_checks_of_a_small_gain_do_not_have_every_step_timed() -> None:
    """They come every eighth step, as they cost little."""
    served = Served(Policy(DECODES), 0.8)
    served.decodes(64, 60)
    trials, timed = served.policy.trials, served.policy.timed
    ways = served.decodes(64, 400)
    assert ways.count(True) > 300
    assert served.policy.trials - trials > 20
    assert served.policy.timed - timed < 200


def test_what_is_chosen_from_a_table_is_the_best_there_is() -> None:
    table = CostTable(
        {8: {SERIAL_ARM: 1.0, "2": 1.5}, 16: {SERIAL_ARM: 2.0, "2": 1.9, "3": 1.895}, 32: {SERIAL_ARM: 4.0, "2": 2.5}}
    )
    assert choose(table, ("2", "3")) == Setting("2", 16)  # 3 lanes are hardly better, and not at 32
    assert table.regret(Setting()) == pytest.approx((1 + 2.0 / 1.895 + 1.6) / 3 - 1)
    assert choose(CostTable({8: table.seconds[8]})) == Setting()
    with pytest.raises(ConfigError, match="no serial time at 8 tokens"):
        CostTable({8: {"2": 1.0}})


def learn_serial(policy: Policy, tokens: int, stages: Stages) -> SizeTimes:
    """A serial decode whose time is known at once; returns what is known of its size."""
    step = policy.saw("decode", tokens, False)
    assert step is not None
    policy.learn(step, stages)
    return policy.kinds[step.kind].sizes.get(step.size, SizeTimes())


def test_stages_of_a_size_are_their_mean() -> None:
    """Without those of the very first step, which may connect."""
    policy, links = Policy(DECODES), (30.0, 1.0, 1.1, 1.2)
    own = [learn_serial(policy, 64, told("decode", 64, False, link)) for link in links][-1]
    assert own.stages is not None
    mean = told("decode", 64, False, 1.1)
    assert (own.stages.seconds, own.stages.waits) == pytest.approx((mean.seconds, mean.waits))
    assert own.stages.layers == 8


def test_the_simulator_is_asked_on_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than all else that a step is timed for; waits over loopback vary by a third."""
    asked = []
    monkeypatch.setattr(dbo_policy, "expected_log_ratio", lambda *_: asked.append(1) or 0.2)
    policy, draw = Policy(DECODES), random.Random(0)
    for _ in range(400):
        if (step := policy.saw("decode", 16, False)) is not None:
            parts = [each * draw.lognormvariate(0.0, 0.3) for each in (0.012, 0.014, 0.005, 0.005)]
            policy.learn(step, Stages(sum(parts), *parts, layers=8))
    assert policy.timed >= 100
    assert len(asked) < policy.timed / 10


def test_steps_of_one_size_are_compared_by_their_tokens() -> None:
    """Until other sizes are known, too: time grows with about the cube root of tokens."""
    policy = Policy(DECODES)
    for _ in range(4):
        own = learn_serial(policy, 16, Stages(0.016))
    own = learn_serial(policy, 31, Stages(0.016 * (31 / 16) ** 0.35))
    assert own.seconds.value == pytest.approx(math.log(0.016))
