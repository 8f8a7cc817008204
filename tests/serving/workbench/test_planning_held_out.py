"""The planner against the published algorithm in predicted steps, on loads that neither has seen."""

from __future__ import annotations

import numpy as np
import pytest
from repository import ROOT

from moe.balance import PARTS, read_loads
from serving.workbench.planning import held_out
from serving.workbench.planning.held_out import RANKS, held_out_gain, held_out_gates
from serving.workbench.planning.published_eplb import published_placement

pytestmark = pytest.mark.long


@pytest.mark.wide
def test_never_worse_and_somewhere_better() -> None:
    gates = list(held_out_gates())
    assert len(gates) == 12
    assert [str(gate) for gate in gates if not gate.passed] == []
    assert sum(gate.predicted > 0.02 for gate in gates) >= 4


@pytest.mark.wide
def test_never_worse_for_source_text_and_mostly_better() -> None:
    """Loads of a router over this repository's files, in windows of eight parts.

    Three windows are judged by chance (the gain has a deviation of 1 to 3%), so they begin at every second of 32 parts.
    """
    parts = read_loads(ROOT / "examples" / "expert_loads" / "128-experts.npy")
    runs = [np.roll(parts, -start, axis=0).reshape(4, 8, -1, 128) for start in range(0, len(parts), 2)]
    cases = [(ranks, redundant) for ranks in RANKS for redundant in (0, 64)]
    gains = {case: np.mean([held_out_gain(windows, *case) for windows in runs]) for case in cases}
    assert min(gains.values()) > -0.002, gains
    assert sum(gain > 0.003 for gain in gains.values()) >= 4, gains


def test_a_planner_that_is_worse_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "plan_placement", lambda seen, before: before)
    windows = np.tile(np.arange(1.0, 129.0), (2, PARTS, 2, 1))
    assert held_out_gain(windows, 16, 0) < -0.1
    monkeypatch.setattr(
        held_out, "plan_placement", lambda seen, before: published_placement(seen.sum(axis=0), 128, before.num_ranks)
    )
    assert held_out_gain(windows, 16, 0) == 0.0
