"""What docs/expert-balance.md says was measured is what the files of `ubatch bench eplb` have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from figures import Figures, check_rows, results, table_below
from repository import ROOT

pytestmark = pytest.mark.long

DOCUMENT = ROOT / "docs" / "expert-balance.md"
ROWS: Mapping[str, str] = {
    "(with - without) / (perfect - without)": "{eplb-gain[gain][of_possible][serial]:.2f []}",
    "perfect / without": "{eplb-gain[gain][possible][serial]:.3fx []}",
    "with / without": "{eplb-gain[gain][gain][serial]:.2fx []}",
    "the same in two lanes": "{eplb-gain[gain][of_possible][dbo]:.2f []} of {eplb-gain[gain][possible][dbo]:.2fx []}",
    "DBO and balance together": "{eplb-gain[gain][both]:.2fx []}",
    "different tokens": "{eplb[same][different]} of {eplb[same][tokens]}",
    "predicted steps": "{errors}",
    "counting": "{eplb[counting][share][prefill]:.3%} of a prefill, {eplb[counting][share][decode]:.2%} of a decode",
    "a step while experts move": "{eplb[moving][median]:.3fx []}",
    "its 99th percentile": "{eplb[moving][p99]:.3fx []}",
    "a full rearrangement": "{rearrangement} of {eplb[options][step_interval]} steps",
    "balanced again": "{interval}; with early plans {early}",
}
"""Begin of a row of the table -> its figures, see `figures.Figures`."""


def test_every_row_is_that_of_the_file() -> None:
    found, shift = results("eplb"), results("eplb-shift")["shift"]
    shifts = {
        mode: f"{max(each['steps'] or 10**9 for each in of)} of {shift['most'][mode]} steps"
        for mode, of in shift["shifts"].items()
    }
    errors = [f"{name} {step['ratio']['median'] - 1:+.1%}" for name, step in found["predict"]["steps"].items()]
    rearrangement = max(found["moving"]["rearrangements"])
    figures = Figures({**shifts, "errors": "; ".join(errors), "rearrangement": rearrangement})
    expected = {label: template.format_map(figures) for label, template in ROWS.items()}
    check_rows(table_below("| what | asked | measured |", DOCUMENT), expected)
