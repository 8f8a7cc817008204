"""The tables of real links in the documents are those of `link.json` and `link-change.json`."""

from __future__ import annotations

import statistics

import pytest
from figures import README, as_table, interval, results, table_below

pytestmark = pytest.mark.long


def test_the_table_of_real_links() -> None:
    """Where it differs, put in these."""
    expected = []
    forced = ("two-lanes", "three-lanes", "single-batch", "two-by-two")
    for found in results("link")["links"]:
        for load, arms in found["loads"].items():
            ratios = [f"{arms[name]['whole']['median']:.2f}" for name in forced]
            serial, dbo = f"{statistics.median(arms['serial']['seconds']):.1f} s", arms["dbo"]
            shares = [f"{dbo[name]:.2f}" for name in ("of_fastest", "learned")]
            cells = [serial, interval(dbo["whole"], unit=""), *shares, *ratios]
            expected.append([f"`{found['link'][0]}`", load, *cells])
        pooled = found["pooled"]
        of_fastest = pooled["dbo"]["median"] / max(own["median"] for own in pooled.values())
        cells = ["", interval(pooled["dbo"], unit=""), f"{of_fastest:.2f}", ""]
        cells += [f"{pooled[name]['median']:.2f}" for name in forced]
        expected.append([f"`{found['link'][0]}`", "all", *cells])
    shown = table_below("| link | load | serial |")
    assert shown == expected, as_table(expected)


def test_the_table_of_real_links_on_the_first_page() -> None:
    """Where it differs, put in these."""
    expected = []
    for found in results("link")["links"]:
        ratios = [*(arms["dbo"]["whole"] for arms in found["loads"].values()), found["pooled"]["dbo"]]
        expected.append([f"`{found['link'][0]}`", *(interval(each) for each in ratios)])
    shown = table_below("| `--enable-dbo` over |", README)
    assert shown == expected, as_table(expected)


def test_the_table_of_a_link_that_changes() -> None:
    """Where it differs, put in these."""
    (found,) = results("link-change")["links"]
    expected = []
    for load, arms in found["loads"].items():
        for name in ("dbo", "two-lanes"):
            halves, whole = arms[name]["halves"], arms[name]["whole"]
            ratios = [interval(each, unit="") for each in (halves["before"], halves["after"], whole)]
            expected.append([load, f"`{name}`", *ratios])
    shown = table_below("| the link changes |")
    assert shown == expected, as_table(expected)
