"""Files, variables and keywords that are not what they should be: each is one line that says where and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.options.sources import read_file, read_keywords
from ubatch import ConfigError


def from_file(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return read_file(file)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place", "key"),
    [
        ("port: 1\nseed: 2\nport: 3\n", "line 3, column 1", "'port' is there twice, first in line 1"),
        ("port: 1\nport: 1\n", "line 2, column 1", "port"),
        ("{port: 1, 'port': 2}\n", "line 1, column 11", "port"),
        ("decode:\n  schedule: serial\n  schedule: plain\n", "line 3, column 3", "schedule"),
        ("schedules:\n  mine: {lanes: 2, lanes: 3}\n", "line 2, column 20", "lanes"),
        ("schedules:\n  mine: {lanes: 2}\n  mine: {lanes: 3}\n", "line 3, column 3", "mine"),
    ],
)
def test_a_key_twice_is_refused_with_its_place(tmp_path: Path, text: str, place: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{place} is not valid YAML: .*{key}"):
        from_file(tmp_path, text)


def test_what_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    text = "schedules:\n  a: {b: &b {<<: &c {lanes: 2, lead: 1}, lanes: 3}}\n  d: {<<: *b, lead: 0}\n"
    assert from_file(tmp_path, text)["schedules"].value["d"] == {"lanes": 3, "lead": 0}


@pytest.mark.parametrize("text", ["schedules: &a {x: *a}\n", "all2all-options: &a {x: *a}\n"])
def test_a_mapping_within_itself_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"settings\.yaml: .* the value contains itself, or is nested too deeply"):
        from_file(tmp_path, text)


def test_a_file_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        from_file(tmp_path, "schedules: " + "[" * 5000 + "]" * 5000)


def test_a_list_within_itself_is_refused_from_python() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(ConfigError, match="all2all_options: the value contains itself"):
        read_keywords({"all2all_options": {"a": itself}})
