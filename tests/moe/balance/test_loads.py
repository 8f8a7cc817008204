"""Expert loads: in windows, sums over ranks of the last steps, whatever the ranks do meanwhile; and in files.

What is written to a file is read again, and what is no such file is refused by name.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from moe.balance import LoadKind, LoadWindows, read_loads, write_loads
from moe.placement import Ints
from ubatch import ConfigError


def counts(prefill: int = 0, decode: int = 0) -> Ints:
    """One layer of two experts; the first has `prefill` tokens, the second `decode`."""
    return np.array([[[prefill, 0]], [[0, decode]]])


def windows(**given: int) -> LoadWindows:
    return LoadWindows(1, 2, **{"window_size": 40, **given})


def total(each: LoadWindows) -> int:
    return int(each.window().of().sum())


def test_kinds_are_apart_and_together() -> None:
    each = windows()
    each.add(0, 4, counts(3, 5))
    each.add(1, 4, counts(30, 50))
    window = each.window()
    assert window.of(LoadKind.PREFILL).tolist() == [[33, 0]]
    assert window.of(LoadKind.DECODE).tolist() == [[0, 55]]
    assert window.of().tolist() == [[33, 55]]
    assert window.steps == 4


def test_a_window_slides_by_parts_over_the_steps_of_all_ranks() -> None:
    each = windows()
    for part in range(25):
        for rank in (0, 1):
            each.add(rank, 4, counts(prefill=1 + 100 * (part == 0)))
        assert each.ended == part
        assert total(each) == 2 * min(part + 1, 10) + 200 * (part < 10)
        assert each.window().steps == 4 * min(part + 1, 10)


def test_ranks_that_report_early_as_they_pause_do_not_shift_the_parts() -> None:
    each = windows()
    for _ in range(3):
        for steps in (1, 3):
            for rank in (0, 1):
                each.add(rank, steps, counts(prefill=steps))
    assert each.ended == 2
    assert each.history().sum(axis=(1, 2)).tolist() == [8, 8, 8]
    assert each.history(2).sum(axis=(1, 2)).tolist() == [8, 8]


def test_engines_that_start_again_go_on_in_the_same_window() -> None:
    each = windows()
    each.add(0, 4, counts(7))
    each.add(1, 2, counts(7))  # rank 1 has failed; both start again, and count anew
    for rank in (0, 1):
        each.add(rank, 4, counts(1))
    assert each.window().of().tolist() == [[16, 0]]
    assert each.history().sum(axis=(1, 2)).tolist() == [14, 2]


def test_a_rank_that_never_reports_does_not_hold_up_the_others() -> None:
    each = windows()
    for _ in range(30):
        each.add(1, 4, counts(1))
    assert total(each) == 10


def test_history_keeps_several_windows() -> None:
    each = windows(keep=3)
    for number in range(50):
        each.add(0, 4, counts(number))
    assert each.history()[:, 0, 0].tolist() == list(range(20, 50))
    assert total(each) == sum(range(40, 50))


def test_small_windows_have_as_many_parts_as_steps() -> None:
    each = windows(window_size=3)
    for number in range(5):
        each.add(0, 1, counts(number))
    assert total(each) == 2 + 3 + 4


def test_an_empty_history_and_wrong_shapes() -> None:
    assert windows().history().shape == (0, 1, 2)
    with pytest.raises(ConfigError, match=r"loads of rank 3 are \[2, 2, 1\], not \[2, 1, 2\]"):
        windows().add(3, 1, np.zeros((2, 2, 1), dtype=np.int64))
    with pytest.raises(ConfigError, match="at least 1"):
        windows(window_size=0)


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
    write_loads(path, np.arange(6).reshape(2, 3))  # without steps, which is one step
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
