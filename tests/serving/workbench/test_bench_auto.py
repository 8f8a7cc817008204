"""`ubatch bench auto`: the load, the best fixed setting, and one short run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository import TINY_MOE

from serving.cli import main
from serving.workbench.arms.cells import Cell
from serving.workbench.arms.cost_table import SERIAL_ARM, Setting
from serving.workbench.bench.runtime.auto import Options, best_fixed, mixed_load, pooled


def test_the_load_is_mixed_and_the_same_on_every_rank() -> None:
    options = Options(model=TINY_MOE)
    load = list(mixed_load(options))
    assert load == list(mixed_load(options))
    assert len(load) == options.steps
    prefills = [cell.tokens for cell in load if cell.mode == "prefill"]
    decodes = [cell.tokens for cell in load if cell.mode == "decode"]
    assert 0.1 < len(prefills) / len(load) < 0.5
    assert max(prefills) == options.max_prefill_tokens
    assert max(decodes) <= options.max_decode_tokens
    assert max(decodes) - min(decodes) > 30


def test_the_best_fixed_setting_is_reckoned() -> None:
    load = [Cell("decode", tokens) for tokens in (8, 16, 32, 64)] + [Cell("prefill", 64)]
    seconds = {
        SERIAL_ARM: [1.0, 2.0, 3.0, 4.0, 1.0],
        "two": [2.0, 2.5, 2.5, 3.0, 2.0],
        "three": [3.0, 3.0, 2.9, 2.9, 3.0],
    }
    assert best_fixed(load, seconds) == {"decode": Setting("two", 32), "prefill": Setting()}


def test_arms_that_ran_alike_are_pooled() -> None:
    """Auto ran the first step serially, with a little luck, and the second like an arm that was declined."""
    forwards = {SERIAL_ARM: [1.0, 2.0], "two": [0.6, 2.4], "auto": [0.8, 1.6]}
    before = {SERIAL_ARM: 0.1, "two": 0.2, "auto": 0.4}
    seconds = {name: [each + before[name] for each in values] for name, values in forwards.items()}
    schedules = {SERIAL_ARM: ["", ""], "two": ["2 lanes", ""], "auto": ["", ""]}
    found = pooled(seconds, forwards, schedules)
    assert found[SERIAL_ARM] == pytest.approx([1.0, 2.1])
    assert found["two"] == pytest.approx([0.8, 2.2])
    assert found["auto"] == pytest.approx([1.3, 2.4])


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    file = tmp_path / "auto.json"
    flags = ["--steps", "40", "--ratios", "0", "4", "--compared", "0.5", "--max-decode-tokens", "16"]
    assert main(["bench", "auto", str(TINY_MOE), *flags, "--max-prefill-tokens", "64", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [link["ratio"] for link in results["links"]] == [0.0, 4.0]
    assert results["links"][0]["bytes_per_s"] is None
    for link in results["links"]:
        assert set(link["seconds"]) == {
            "serial",
            "single_batch",
            "mlp_shared_overlap in 2 lanes",
            "mlp_shared_overlap in 3 lanes",
            "mlp_shared_overlap_2_chunks in 2 lanes",
            "auto",
        }
        assert {len(values) for values in link["seconds"].values()} == {len(link["load"])}
        for figure, arms in (("against_serial", ["serial"]), ("against_best", link["seconds"])):
            assert link[figure]["low"] <= link[figure]["median"] <= link[figure]["high"]
            least = sum(min(link["seconds"][arm][step] for arm in arms) for step in range(len(link["load"])))
            assert link[figure]["median"] >= least / sum(link["seconds"]["auto"]) - 1e-3  # written to microseconds
        steps = len(link["load"])
        assert len(link["ran"]) == steps
        for arm, seconds in link["seconds"].items():
            assert len(link["forwards"][arm]) == steps
            assert all(0 < forward < whole for forward, whole in zip(link["forwards"][arm], seconds, strict=True))
        for figure in ("pooled_serial", "pooled_best"):
            assert link[figure]["low"] <= link[figure]["median"] <= link[figure]["high"]
    fast, slow = (sum(link["seconds"]["serial"]) for link in results["links"])
    assert slow > 1.5 * fast  # the link is there
