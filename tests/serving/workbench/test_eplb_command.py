"""`ubatch eplb`: from a file of loads to a placement, scored on steps that it was not planned for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from moe import ExpertPlacement
from moe.balance import arrivals, mean_balancedness, plan_placement, write_loads
from serving.cli import main

STEPS, LAYERS, EXPERTS = 6, 3, 16


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    popularity = 1000 * chance.lognormal(0.0, 1.0, (LAYERS, EXPERTS))
    path = tmp_path / "loads.npy"
    write_loads(path, chance.poisson(popularity, (STEPS, LAYERS, EXPERTS)))
    return path


def eplb(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["eplb", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_table_is_of_the_steps_that_were_not_planned_for(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = loads.with_name("placement.yaml")
    told = eplb(capsys, loads, "--ranks", 4, "--redundant", 4, "--layers", "--expert-bytes", 10**9, "--out", out)
    steps = np.load(loads)
    in_force = ExpertPlacement.default(LAYERS, EXPERTS, 4, 4)
    planned = plan_placement(steps[:3], in_force)
    assert ExpertPlacement.load(out) == planned
    before, after = (mean_balancedness(each, steps[3:]) for each in (in_force, planned))
    assert "planned for the first 3, scored on the next 3" in told
    assert row(told, "all layers") == [f"{before.mean():.3f}", f"{after.mean():.3f}"]
    assert row(told, "worst layer") == [f"{before.min():.3f}", f"{after.min():.3f}"]
    for layer in range(LAYERS):
        assert row(told, f"layer {layer}") == [f"{before[layer]:.3f}", f"{after[layer]:.3f}"]
    moved = arrivals(in_force, planned).sum()
    assert f"{moved} of {LAYERS * 20} experts move to another rank ({moved} GB)" in told


def row(told: str, name: str) -> list[str]:
    (line,) = re.findall(rf"^ *{name} +(.*)$", told, re.MULTILINE)
    return line.split()


def test_a_placement_in_force_is_kept_if_it_is_as_good(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = loads.with_name("placement.json")
    eplb(capsys, loads, "--ranks", 4, "--out", out)
    told = eplb(capsys, loads, "--placement", out)
    assert "do nothing" in told
    assert "0 of 48 experts move" in told


def test_groups_of_experts_stay_on_nodes(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = eplb(capsys, loads, "--ranks", 4, "--nodes", 2, "--groups", 4)
    assert "2 groups of experts on each of 2 nodes" in told
    assert "any expert on any of 2 nodes" in eplb(capsys, loads, "--ranks", 4, "--nodes", 2, "--groups", 1)


def test_one_step_is_scored_on_itself_and_says_so(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = loads.with_name("one.json")
    write_loads(one, np.load(loads)[:1])
    assert "scored on it; give two steps" in eplb(capsys, one, "--ranks", 5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--ranks is missing"),
        (["--ranks", "4", "--nodes", "3"], "4 ranks do not divide by 3 nodes"),
        (["--ranks", "4", "--groups", "3"], "16 experts do not divide by 3 groups"),
        (["--placement", "OTHER", "--ranks", "4"], "--ranks has no effect with --placement"),
        (["--placement", "OTHER", "--redundant", "4"], "--redundant has no effect with --placement"),
        (["--placement", "OTHER"], "has 1 MoE layers of 8 experts, but"),
        (["--placement", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["--ranks", "4", "--out", "no/such/folder.yaml"], "--out: cannot write no/such/folder.yaml"),
        (["--ranks", "4", "--out", "placement.toml"], "--out placement.toml: a placement's name ends with .yaml or"),
        (["--ranks", "4", "--redundant", "100000000"], "100000000 redundant experts are too many: with 48, each of 4"),
        (["--ranks", "1000000000"], "--ranks 1000000000: it should be at most 1024"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str], says: str, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = loads.with_name("other.yaml")
    ExpertPlacement.default(1, 8, 2).save(other)
    assert main(["eplb", str(loads), *[str(other) if word == "OTHER" else word for word in words]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_loads_without_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_loads(tmp_path / "none.npy", np.zeros((2, 1, 4)))
    assert main(["eplb", str(tmp_path / "none.npy"), "--ranks", "2"]) == 2
    assert "no tokens to plan for" in capsys.readouterr().err
