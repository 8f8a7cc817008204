"""Files of expert loads: what is written is read again, and what is no such file is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from moe.balance import read_loads, write_loads
from ubatch import ConfigError


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    loads = np.arange(24).reshape(2, 3, 4) + 2**52
    path = tmp_path / f"loads{suffix}"
    for factor in (1, 0):  # an existing file is replaced
        write_loads(path, loads * factor)
        read = read_loads(path)
        assert read.dtype == np.float64
        np.testing.assert_array_equal(read, loads * factor)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_loads_without_steps_are_one_step(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"loads{suffix}"
    write_loads(path, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(read_loads(path), [[[0, 1, 2], [3, 4, 5]]])


def test_an_objects_logical_count_is_read(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"logical_count": [[1, 2.5]]}))
    np.testing.assert_array_equal(read_loads(path), [[[1, 2.5]]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a .json file of expert loads"),
        ('{"counts": []}', "no 'logical_count', only ['counts']"),
        ("[[1, 2], [3]]", "differ in length"),
        ("[1, 2]", "[steps, layers, experts] or [layers, experts], not [2]"),
        ("[[]]", "not [1, 0]"),
        ('[["a"]]', "are numbers"),
        ("[[true]]", "are numbers"),
        ("[[1, -2]]", "expert 1 in MoE layer 0 of step 0 is -2"),
        ("[[1, NaN]]", "of step 0 is nan"),
        ("[" * 100_000, "not a .json file"),
    ],
)
def test_what_is_no_json_of_loads_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_loads(path)


def test_what_is_no_array_of_loads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    np.save(path, np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"not a \.npy file"):
        read_loads(path)
    np.save(path, np.ones((4, 8, 16)))
    path.write_bytes(path.read_bytes()[:-1])  # the header promises more
    with pytest.raises(ConfigError, match=r"not a \.npy file"):
        read_loads(path)
    begin = b"\x93NUMPY\x01\x00"
    large = b"\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,)}"
    for wrong in (b"", b"no array", b"PK\x03\x04 a zip", begin + b"\x02\x00((", begin + large):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"not a \.npy file") as refused:
            read_loads(path)
        assert "pickle" not in str(refused.value)


def test_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for name in ("loads.txt", "loads"):
        with pytest.raises(ConfigError, match=r"ends with \.npy or \.json"):
            read_loads(tmp_path / name)
        with pytest.raises(ConfigError, match=r"ends with \.npy or \.json"):
            write_loads(tmp_path / name, np.ones((1, 1, 1)))
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_loads(tmp_path / "loads.npy")
