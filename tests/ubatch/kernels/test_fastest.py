"""The choice between back ends by measurement, with fake times: what is timed, kept and dropped."""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fastest_cases import ToldTimes, told

from ubatch import ConfigError
from ubatch.kernels import autotuner, candidates

CPU = torch.device("cpu")
BATCHES = ("64 tokens", "4096 tokens")


class Made:
    """A back end with something that takes memory."""


def makers(made: list[str], *names: str) -> dict[str, Callable[[], list[Callable[[], object]]]]:
    def make(name: str) -> list[Callable[[], object]]:
        made.append(name)
        return [lambda: None] * len(BATCHES)

    return {name: lambda name=name: make(name) for name in names}  # type: ignore[misc]


def test_the_times_of_all_batches_count_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the sum: the large batch would decide alone."""
    times = {"ours": (4.0, 100.0), "theirs": (1.0, 120.0), "torch": (0.5, 900.0)}
    timer = told(monkeypatch, tmp_path, times)
    made: list[str] = []
    chosen = candidates.fastest("experts", makers(made, *times), BATCHES, device=CPU)
    assert chosen.name == "theirs"
    assert chosen.reason == (
        "fastest of ours, theirs, torch with 64 tokens and 4096 tokens on this device, kept in "
        f"{autotuner.autotune_path()}"
    )
    assert made == list(times), "each is made once, in its turn"
    assert timer.timed == [(name, batch) for name in times for batch in range(2)]


def test_it_is_kept_in_the_file_by_work_names_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "autotune.json"
    times = {"ours": (2.0, 2.0), "theirs": (1.0, 1.0)}
    told(monkeypatch, tmp_path, times)
    candidates.fastest("experts", makers([], *times), BATCHES, device=CPU, packages=["torch", "surely-not-there"])
    (key,) = json.loads(file.read_text())["told"]
    versions = f"torch {torch.__version__.partition('+')[0]}"
    assert key.startswith(f"experts: ours or theirs, 64 tokens, 4096 tokens, {versions}")
    assert key.endswith(", surely-not-there none")

    made: list[str] = []
    told(monkeypatch, tmp_path, dict.fromkeys(times, (math.inf, math.inf)))  # another process
    again = candidates.fastest(
        "experts", makers(made, *times), BATCHES, device=CPU, packages=["torch", "surely-not-there"]
    )
    assert (again.name, made) == ("theirs", [])
    fewer = candidates.fastest("experts", makers(made, "ours"), BATCHES, device=CPU)
    assert (fewer.name, fewer.reason, made) == ("ours", "the only one that can run here", [])
    candidates.fastest("other experts", makers(made, *times), BATCHES, device=CPU)
    assert made == ["ours", "theirs"], "other work is measured anew"


def test_what_fails_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a ConfigError, which ends other autotuning."""

    def refuses() -> list[Callable[[], object]]:
        raise ConfigError("no compiler here")

    def crashes() -> None:
        raise RuntimeError("no such kernel")

    told(monkeypatch, tmp_path, {"ours": (1.0, 1.0)})
    ways = {"theirs": refuses, "torch": lambda: [lambda: None, crashes], **makers([], "ours")}
    with caplog.at_level(logging.WARNING):
        assert candidates.fastest("experts", ways, BATCHES, device=CPU).name == "ours"
    assert [record.getMessage() for record in caplog.records] == [
        "experts: theirs is left out, as it fails here: ConfigError('no compiler here')",
        "experts: torch is left out, as it fails here: RuntimeError('no such kernel')",
    ]
    del ways["ours"]
    with pytest.raises(ConfigError, match=r"none of the 2 ways to run 'experts: theirs or torch"):
        candidates.fastest("experts", ways, BATCHES, device=CPU)


def test_it_tells_which_work_and_tries_what_a_remembered_choice_left_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> list[Callable[[], object]]:
        raise RuntimeError("no such kernel")

    times = {"ours": (1.0, 1.0), "theirs": (2.0, 2.0)}
    told(monkeypatch, tmp_path, times)
    made: list[str] = []
    ways = {**makers(made, *times), "torch": refuses}
    chosen = candidates.fastest("experts", ways, BATCHES, device=CPU)
    assert [chosen.works(name) for name in ways] == [True, True, False]
    assert made == [*times], "none is made again"

    told(monkeypatch, tmp_path, {})  # another process, in which what was chosen fails
    again = candidates.fastest("experts", {**ways, "ours": refuses}, BATCHES, device=CPU)
    assert again == chosen
    assert [again.works(name) for name in ways] == [False, True, False]
    assert made == [*times, "theirs"]


def test_no_two_back_ends_are_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[weakref.ref[Made]] = []

    def make() -> list[Callable[[], object]]:
        assert not any(each() for each in living), "the one before still has its memory"
        weights = Made()
        living.append(weakref.ref(weights))
        return [lambda: weights] * len(BATCHES)

    told(monkeypatch, tmp_path, {"ours": (1.0, 1.0), "theirs": (2.0, 2.0)})
    candidates.fastest("experts", {"ours": make, "theirs": make}, BATCHES, device=CPU)
    assert len(living) == 2
    assert not any(each() for each in living)


def test_where_nothing_can_be_timed_it_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer: ToldTimes = told(monkeypatch, tmp_path, {})
    timer.idle = False
    made: list[str] = []
    assert candidates.fastest("experts", makers(made, "ours", "theirs"), BATCHES, device=CPU).name == "ours"
    assert not made
