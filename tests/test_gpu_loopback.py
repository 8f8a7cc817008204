"""The single-GPU benchmark: it checks its own output, so running it small is the test."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_loopback import measure, results


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("no_thread_leaks")
def test_overlapped_equals_plain_and_every_arm_is_measured(device: str) -> None:
    arms = measure(torch.device(device), tokens=32, hidden=64, intermediate=128, layers=3, blocks=2)
    assert list(arms) == ["compute", "split_compute", "communication", "serial", "overlapped"]
    assert all(len(values) == 2 and min(values) > 0 for values in arms.values())


def test_results_of_a_perfect_overlap() -> None:
    arms = {"compute": [9.0], "split_compute": [10.0], "communication": [8.0], "serial": [17.0], "overlapped": [10.0]}
    found = {name: interval.median for name, interval in results(arms).items()}
    assert found == {"efficiency": 1.0, "hidden": 1.0, "speedup": 1.7}
