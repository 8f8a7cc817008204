"""Windows of expert loads: sums over ranks of the last steps, whatever the ranks do meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from moe.balance import LoadKind, LoadWindows
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
