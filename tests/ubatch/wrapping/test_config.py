"""Settings: every invalid one is refused before anything runs, with the value and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ubatch import SCHEDULES, ConfigError, Schedule, UBatchConfig
from ubatch.schedules.modes import MODE_KEYS, ModeSettings
from ubatch.schedules.schedule import Recv


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
        (
            {"dbo_decode_token_threshold": 1},
            r"dbo_decode_token_threshold is 1, below the 2 lanes of .*at least 2",
        ),
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
