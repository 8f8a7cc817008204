"""Settings: every invalid one is refused before anything runs, with the value and the remedy; and those of one mode."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT

import ubatch
from ubatch import SCHEDULES, ConfigError, ForwardMode, Offer, Recv, Schedule, UBatchConfig, Wish, fingerprint
from ubatch.schedules.modes import MODE_KEYS, ModeSettings


def refused(message: str, make: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*args, **kwargs)


def test_defaults_are_vllms() -> None:
    config = UBatchConfig()
    assert (config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold, config.num_ubatches) == (32, 512, 2)
    assert config.resolved_schedule() == SCHEDULES["mlp_shared_overlap"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_ubatches = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "two_batch_decod"}, r"unknown schedule 'two_batch_decod'; did you mean 'two_batch_decode'\?"),
        ({"schedule": "zzz"}, r"unknown schedule 'zzz'\. Known: mlp_shared_overlap, serial, single_batch"),
        ({"split_by": "costs"}, r"unknown split_by 'costs'; did you mean 'cost'\?"),
        ({"schedule": 3}, r"schedule must be str( or Schedule)?, not 3 \(int\)"),
        ({"num_ubatches": 1}, r"num_ubatches must be 2 to 8, not 1\. Set enable_dbo=False to run unsplit"),
        ({"num_ubatches": 9}, r"num_ubatches must be 2 to 8, not 9"),
        ({"num_ubatches": 2.0}, r"num_ubatches must be int, not 2\.0 \(float\)"),
        ({"num_ubatches": True}, r"num_ubatches must be int, not True \(bool\)"),
        ({"dbo_decode_token_threshold": 1}, r"dbo_decode_token_threshold is 1, below the 2 lanes of .*at least 2"),
        (
            {"dbo_prefill_token_threshold": 3, "num_ubatches": 4},
            r"dbo_prefill_token_threshold is 3, below the 4 lanes of schedule .*: a lane would be empty.*at least 4",
        ),
        ({"enable_dbo": 1}, r"enable_dbo must be bool, not 1 \(int\)"),
        ({"enable_dbo": "yes"}, r"enable_dbo must be bool, not 'yes' \(str\)"),
        ({"require_overlap": None}, r"require_overlap must be bool, not None"),
        ({"timeout_s": 0}, r"timeout_s must be positive, not 0"),
        ({"timeout_s": -1.5}, r"timeout_s must be positive, not -1\.5"),
        ({"timeout_s": float("nan")}, r"timeout_s must be positive, not nan"),
        ({"timeout_s": "30"}, r"timeout_s must be float, not '30' \(str\)"),
        ({"timeout_s": True}, r"timeout_s must be float, not True \(bool\)"),
        ({"tbo_token_distribution_threshold": 0.6}, r"tbo_token_distribution_threshold is 0\.6; it must be 0 to 0\.5"),
        ({"tbo_token_distribution_threshold": float("nan")}, r"is nan; it must be 0 to 0\.5"),
        ({"group": "world"}, r"group must be a CommGroup, not str.*CommGroup\.from_process_group"),
        ({"split_dims": ["x"]}, r"split_dims must be Mapping, not \['x'\]"),
        ({"split_dims": {"x": "0"}}, r"split_dims\['x'\] must be int or None, not '0'"),
        ({"split_dims": {"x": True}}, r"split_dims\['x'\] must be int or None, not True"),
        ({"split_dims": {0: 0}}, r"a key of split_dims must be str, not 0 \(int\)"),
        ({"output_dims": {"logits": 1.0}}, r"output_dims\['logits'\] must be int or None, not 1\.0"),
        ({"output_dims": {1: 0}}, r"a key of output_dims must be str, not 1 \(int\)"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    refused(message, UBatchConfig, **settings)
    if not isinstance(settings.get("schedule"), Schedule):
        refused(r"unknown key" if "group" in settings else message, UBatchConfig.from_mapping, settings)


def test_a_schedule_gets_the_configured_lanes() -> None:
    assert UBatchConfig(num_ubatches=4).resolved_schedule().lanes == 4
    assert UBatchConfig(num_ubatches=3, schedule=Schedule("mine", lead=3)).resolved_schedule() == Schedule(
        "mine", lanes=3, lead=3
    )
    assert UBatchConfig(num_ubatches=4, schedule="serial").resolved_schedule().lanes == 1


def test_keys_in_kebab_and_snake_case() -> None:
    kebab = UBatchConfig.from_mapping({"num-ubatches": 3, "dbo-decode-token-threshold": 8, "timeout-s": 5})
    assert kebab == UBatchConfig.from_mapping({"num_ubatches": 3, "dbo_decode_token_threshold": 8, "timeout_s": 5.0})
    both = {"num-ubatches": 2, "num_ubatches": 4}
    refused("'num_ubatches' is given twice, with hyphens and with underscores", UBatchConfig.from_mapping, both)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("dbo-decode-threshold", r"unknown key 'dbo-decode-threshold'; did you mean 'dbo_decode_token_threshold'\?"),
        ("dbo_prefil_token_threshold", r"did you mean 'dbo_prefill_token_threshold'\?"),
        ("ubatches", r"did you mean 'num_ubatches'\?"),
        ("group", r"unknown key 'group'"),
        (7, r"unknown key 7\. Known: comm_sms, cudagraph_capture_sizes, dbo_decode_token_threshold, dbo_prefill_"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(key: object, hint: str) -> None:
    refused(hint, UBatchConfig.from_mapping, {key: 2})


def test_what_was_written_as_yaml_is_read_back(tmp_path: Path) -> None:
    config = UBatchConfig(
        enable_dbo=False,
        num_ubatches=3,
        dbo_decode_token_threshold=7,
        dbo_prefill_token_threshold=70,
        schedule="two_batch_decode",
        comm_sms=24,
        split_by="cost",
        tbo_token_distribution_threshold=0.25,
        timeout_s=1.5,
        split_dims={"x": 1, "batch.table": None},
        output_dims={"logits": -1},
        profile_ranges=True,
        require_overlap=True,
        cudagraph_capture_sizes=(64, 8),
        schedules={
            "mine": Schedule("mine", lanes=4, chunks=2, lead=1, points_off=frozenset({"output"}), recv=Recv.PEER)
        },
        modes={
            "decode": ModeSettings("mine", 5, 80),
            "verify": ModeSettings(token_threshold=9),
            "prefill": ModeSettings(),
        },
    )
    described = config.describe()
    assert set(described) == {*(field.name for field in dataclasses.fields(UBatchConfig)), *MODE_KEYS} - {
        "group",
        "modes",
    }
    assert all(described[field.name] != getattr(UBatchConfig(), field.name) for field in dataclasses.fields(config)[:9])
    file = tmp_path / "dbo.yaml"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    assert UBatchConfig.from_yaml(file) == UBatchConfig.from_yaml(str(file)) == config


@pytest.mark.parametrize("text", ["", "# nothing set\n", "{}"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "dbo.yaml"
    file.write_text(text, encoding="utf-8")
    assert UBatchConfig.from_yaml(file) == UBatchConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- num_ubatches\n", r"must hold one mapping of settings, not list"),
        (b"fast\n", r"must hold one mapping of settings, not str"),
        (b"a: [1, 2\n", r"is not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", r"is not valid YAML"),
        (b"\xff\xfe\xff\xff", r"cannot read .*: it is not UTF-8 text"),
        (b"num-ubatchs: 3\n", r"dbo.yaml: unknown key 'num-ubatchs'; did you mean 'num_ubatches'\?"),
        (b"num-ubatches: three\n", r"dbo.yaml: num-ubatches must be int, not 'three'"),
        (b"dbo-decode-token-threshold: 1\n", r"dbo.yaml: dbo_decode_token_threshold is 1, below the 2 lanes"),
        (b"schedule: serail\n", r"dbo.yaml: unknown schedule 'serail'; did you mean 'serial'\?"),
        (b"split_dims: {0: 1}\n", r"dbo.yaml: a key of split_dims must be str"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "dbo.yaml"
    file.write_bytes(content)
    refused(message, UBatchConfig.from_yaml, file)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    refused(r"cannot read .*absent\.yaml: No such file", UBatchConfig.from_yaml, tmp_path / "absent.yaml")
    refused(r"cannot read .*: Is a directory", UBatchConfig.from_yaml, tmp_path)


# ------------------------------------------------------------------------------------------------------------- per mode


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
    assert decode.schedule == Schedule(
        "mine", 3, 2, True, 1, frozenset({"layer", "output"}), ubatch.SharedExpert.DISPATCH
    )
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
        ({"decode": {"token-threshold": 4, "token_threshold": 4}}, r"decode: 'token_threshold' is given twice"),
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


def voted(config: UBatchConfig, mode: ForwardMode) -> ubatch.Decision:
    """A rank with tokens under `config` and one without."""
    schedule = config.for_mode(mode).schedule
    busy = Offer(
        Wish.YES, (2,) * schedule.lanes, schedule.lanes, None, fingerprint(schedule.describe()), fingerprint(mode)
    )
    return ubatch.decide([busy, Offer(Wish.IDLE, (0,), 1)])


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
