"""Settings per mode, user-defined schedules, and the ranks' agreement on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from repository import ROOT

from ubatch import (
    SCHEDULES,
    ConfigError,
    Decision,
    ForwardMode,
    Offer,
    Schedule,
    SharedExpert,
    UBatchConfig,
    Wish,
    decide,
    fingerprint,
)
from ubatch.schedules.modes import ModeSettings

MINE = {"lanes": 3, "chunks": 2, "lead": 1, "points_off": ["layer", "output"], "shared_expert": "dispatch"}
CONFIG: Mapping[str, Any] = {
    "num-ubatches": 2,
    "schedules": {"mine": MINE},
    "decode": {"schedule": "mine", "token-threshold": 64},
    "prefill": {"num_ubatches": 4},
    "verify": {"schedule": "single_batch", "token_threshold": 1},
}


def test_every_mode_has_its_own_settings_or_those_of_all() -> None:
    config = UBatchConfig.from_mapping(CONFIG)
    decode, prefill, verify = (
        config.for_mode(mode) for mode in (ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY)
    )
    assert decode.schedule == Schedule("mine", 3, 2, True, 1, frozenset({"layer", "output"}), SharedExpert.DISPATCH)
    assert decode.token_threshold == 64
    assert prefill.schedule == replace(SCHEDULES["mlp_shared_overlap"], lanes=4)
    assert prefill.token_threshold == config.dbo_prefill_token_threshold
    assert (verify.schedule, verify.token_threshold) == (SCHEDULES["single_batch"], 1)
    assert [each.single_batch for each in (decode, prefill, verify)] == [False, False, True]
    assert config.for_mode(ForwardMode.MIXED) == prefill, "a mixed batch counts as prefill"
    plain = UBatchConfig()
    assert {plain.for_mode(mode).schedule for mode in ForwardMode} == {plain.resolved_schedule()}
    assert plain.for_mode(ForwardMode.TARGET_VERIFY).token_threshold == plain.dbo_decode_token_threshold


def test_what_the_example_shows_in_comments_can_be_used() -> None:
    text = (ROOT / "examples" / "dbo.yaml").read_text()
    shown = text[text.index("# decode:") :]
    config = UBatchConfig.from_mapping(
        yaml.safe_load("\n".join(line.removeprefix("# ") for line in shown.splitlines()))
    )
    assert set(config.modes) == {"decode", "prefill", "verify"}
    assert config.for_mode(ForwardMode.PREFILL).schedule.name == "mine"


def test_one_s_own_schedule_has_its_own_lanes_unless_told_otherwise() -> None:
    own = {"schedules": {"mine": MINE}, "schedule": "mine"}
    assert UBatchConfig.from_mapping(own).resolved_schedule().lanes == 3
    asked = UBatchConfig.from_mapping({**own, "decode": {"num_ubatches": 5}})
    assert [asked.for_mode(mode).schedule.lanes for mode in (ForwardMode.DECODE, ForwardMode.PREFILL)] == [5, 3]


def test_comm_sms_are_left_in_every_mode() -> None:
    config = UBatchConfig.from_mapping({**CONFIG, "comm_sms": 16})
    assert {config.for_mode(mode).schedule.comm_sms for mode in ForwardMode} == {16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decod": {}}, r"unknown key 'decod'; did you mean 'decode'\?"),
        ({"decode": "mine"}, r"decode must be Mapping, not 'mine'"),
        ({"decode": {"shedule": "serial"}}, r"decode: unknown key 'shedule'; did you mean 'schedule'\?"),
        ({"decode": {"schedule": "serail"}}, r"decode: unknown schedule 'serail'; did you mean 'serial'\?"),
        ({"decode": {"schedule": "mine"}}, r"unknown schedule 'mine'.*Known: mlp_shared_overlap"),
        ({"schedules": {"mine": {}}, "schedule": "mien"}, r"unknown schedule 'mien'; did you mean 'mine'\?"),
        ({"verify": {"schedule": 3}}, r"verify: schedule must be the name of a schedule, not 3"),
        ({"verify": {"num_ubatches": 9}}, r"verify: num_ubatches must be 2 to 8, not 9"),
        ({"verify": {"num_ubatches": True}}, r"verify: num_ubatches must be int, not True"),
        ({"verify": {"token_threshold": 0}}, r"verify: token_threshold must be at least 1, not 0"),
        (
            {"decode": {"token-threshold": 4, "token_threshold": 4}},
            r"decode: 'token_threshold' is given twice",
        ),
        ({"prefill": {"num_ubatches": 4, "token_threshold": 3}}, r"prefill: token_threshold is 3, below the 4 lanes"),
        (
            {"prefill": {"schedule": "serial", "num_ubatches": 4}},
            r"prefill: num_ubatches is 4, but schedule 'serial' has one lane",
        ),
        (
            {"dbo_decode_token_threshold": 2, "decode": {"num_ubatches": 3}},
            r"decode: dbo_decode_token_threshold is 2, below the 3 lanes",
        ),
        ({"schedules": {"serial": {}}}, r"schedules has 'serial', which is a schedule of this package"),
        ({"schedules": {3: {}}}, r"a key of schedules must be str, not 3"),
        ({"schedules": {"mine": 3}}, r"schedules\['mine'\] must be Mapping, not 3"),
        ({"schedules": {"mine": {"lane": 3}}}, r"schedule 'mine': unknown key 'lane'; did you mean 'lanes'\?"),
        ({"schedules": {"mine": {"lanes": "3"}}}, r"schedule 'mine': lanes must be int, not '3'"),
        ({"schedules": {"mine": {"lanes": 9}}}, r"schedules\['mine'\] has 9 lanes; there are at most 8"),
        ({"schedules": {"mine": {"lead": True}}}, r"schedule 'mine': lead must be int, not True"),
        ({"schedules": {"mine": {"recv": "onwer"}}}, r"schedule 'mine': unknown recv 'onwer'; did you mean 'owner'"),
        ({"schedules": {"mine": {"points_off": "layer"}}}, r"points_off must be list or tuple, not 'layer'"),
        ({"schedules": {"mine": {"points_off": ["lyer"]}}}, r"unknown point 'lyer'; did you mean 'layer'\?"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UBatchConfig.from_mapping(settings)


def test_python_callers_are_checked_too() -> None:
    for settings, message in (
        ({"modes": {"mixed": ModeSettings()}}, r"unknown mode 'mixed'"),
        ({"modes": {"decode": {"schedule": "serial"}}}, r"modes\['decode'\] must be ModeSettings"),
        ({"schedules": {"mine": Schedule("yours")}}, r"schedules\['mine'\] calls itself 'yours'"),
        ({"schedules": {"mine": {"lanes": 2}}}, r"schedules\['mine'\] must be Schedule"),
    ):
        with pytest.raises(ConfigError, match=message):
            UBatchConfig(**settings)  # type: ignore[arg-type]


def test_a_schedule_survives_its_mapping() -> None:
    for schedule in (*SCHEDULES.values(), Schedule.from_mapping("mine", MINE)):
        assert Schedule.from_mapping(schedule.name, schedule.to_mapping()) == schedule


def test_a_signalled_schedule_is_read_and_ranks_compare_it() -> None:
    config = UBatchConfig.from_mapping(
        {"schedule": "mine", "schedules": {"mine": {"lanes": 1, "comm-sms": 8, "signalled": True}}}
    )
    schedule = config.resolved_schedule()
    assert schedule == Schedule("mine", lanes=1, comm_sms=8, signalled=True)
    assert all(config.for_mode(mode).single_batch and config.for_mode(mode).overlaps for mode in ForwardMode)
    assert schedule.describe().endswith(", combine signalled")
    assert "signalled" not in replace(schedule, signalled=False).describe()
    with pytest.raises(ConfigError, match="signalled must be bool, not 1"):
        Schedule.from_mapping("mine", {"signalled": 1})


def voted(config: UBatchConfig, mode: ForwardMode) -> Decision:
    """A rank with tokens under `config` and one without."""
    schedule = config.for_mode(mode).schedule
    busy = Offer(
        Wish.YES, (2,) * schedule.lanes, schedule.lanes, None, fingerprint(schedule.describe()), fingerprint(mode)
    )
    return decide([busy, Offer(Wish.IDLE, (0,), 1)])


def test_an_idle_rank_runs_what_the_others_run() -> None:
    config = UBatchConfig.from_mapping(CONFIG)
    for mode in (ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY):
        assert config.agreed_schedule(voted(config, mode), ForwardMode.IDLE) == config.for_mode(mode).schedule
    more = replace(config, modes={**config.modes, "decode": ModeSettings("mine", 4)})
    agreed = config.agreed_schedule(voted(more, ForwardMode.DECODE), ForwardMode.IDLE)
    assert agreed == more.for_mode(ForwardMode.DECODE).schedule, "the others' settings for this step have more lanes"


def test_an_idle_rank_without_the_schedule_says_so() -> None:
    others = UBatchConfig.from_mapping(CONFIG)
    with pytest.raises(ConfigError, match=r"the other ranks overlap decode steps with a schedule of 3 lanes that this"):
        UBatchConfig().agreed_schedule(voted(others, ForwardMode.DECODE), ForwardMode.IDLE)
