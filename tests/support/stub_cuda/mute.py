"""Over the stub numbers mean nothing: comparisons of them are muted, and tests that are nothing else are left out.

A pytest plugin (`-p stub_cuda.mute`). As a program, `python -m stub_cuda.mute MODULE ARGUMENTS...`, it runs a module
as `python -m` does, muted. Both write what the stub counted into the file that STUB_CUDA_COUNTS names, in JSON.

The first launch of every kernel is compared with Triton's; see `stub_cuda.counts`.

What a kernel should have written is whatever its memory held before. So tests pass or fail here for what they launch,
copy, capture and wait for, never for what they compute.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_cuda.build import COUNTS
from stub_cuda.counts import compare_launches, counts, summary
from torch import Tensor

_SLEEPS = "needs a device that is busy for a while"
_NUMBERS = "reads numbers that a kernel wrote, and asserts them at once"
_COUNTS = "its experts or its transport count rows by what a kernel wrote, and allocate so many"
_PROFILE = "reads the profiler, which finds no device"

LEFT_OUT = {
    "test_stream_backends.py::test_a_back_end[an_event_tells_when_its_work_is_done-cuda]": _SLEEPS,
    "test_stream_backends.py::test_a_back_end[a_stream_waits_for_an_event-cuda]": _SLEEPS,
    "test_cuda_device.py::test_the_host_waits_for_its_numbers_only": _SLEEPS,
    "test_cuda_device.py::test_nccl": "needs a device that is busy for a while; test_stub_nccl.py has the rest of it",
    "test_cuda_device.py::test_memory_is_not_given_out_while_it_travels": _NUMBERS,
    "test_cuda_device.py::test_outside_lanes_the_host_gets_its_numbers": _NUMBERS,
    "test_cuda_device.py::test_a_failure_leaves_the_device_usable": _NUMBERS,
    "test_step_streams_gpu.py::test_a_launch_returns_before_the_forward_has_begun": _SLEEPS,
    "test_step_streams_gpu.py::test_a_step_is_read_while_the_next_one_runs": _SLEEPS,
    "test_step_streams_gpu.py::test_inputs_arrive_while_a_step_runs_and_the_caller_waits_for_nobody": _SLEEPS,
    "test_step_streams_gpu.py::test_constrained_sampling_waits_for_tokens_but_its_forward_does_not": _SLEEPS,
    "test_step_streams_gpu.py::test_closing_waits_for_what_is_queued": _SLEEPS,
    "test_runner_graphs_gpu.py::test_drafts_of_graphs[shape1]": "counts the drafts that the model accepts",
    "test_step_settings_gpu.py::test_times_are_the_devices_own": "compares times of the device and of the host",
    "test_moe_gpu.py::test_results": _COUNTS,
    "test_moe_gpu.py::test_the_host_waits_for_counts_at_most[torch_dist]": _COUNTS,
    "test_moe_gpu.py::test_eager": _COUNTS,
    "test_moe_signals.py::test_a_device_tells_the_host": _NUMBERS,
    "test_moe_signals.py::test_the_copy_runs_beside_the_projection": _SLEEPS,
    "test_moe_signalled_gpu.py::test_on_a_gpu_the_layer_is_right_and_the_copy_runs_beside_the_projection": _PROFILE,
}
"""Test, as `file::test` or `file::test[parameters]`, and why it says nothing here."""
UNTIL_NUMBERS = {
    "test_moe_gpu.py::test_captured": "captures and replays a layer, then looks at the norm of what it computed",
    "test_kernels_once.py::test_once": "compiles, loads and launches a kernel, then looks at numbers by itself",
}
"""Tests that run until their first assertion; every other error is one."""


def mute() -> None:
    """Let every comparison of tensors succeed, and whatever reads a number that a kernel wrote do without."""
    import model_runner.pending_step as pending_step
    import moe.experts.triton_batched as batched
    import ubatch.kernels.autotuner as autotune

    torch.equal = lambda *_: True
    torch.allclose = lambda *_, **__: True
    torch.testing.assert_close = lambda *_, **__: None
    autotune._agree = lambda *_: True
    batched.some_rows = _first_row
    to_host = pending_step.to_host
    pending_step.to_host = lambda *tensors: _ZerosOnHost(to_host(*tensors))


def _mute_benchmarks() -> None:
    import serving.workbench.gpu.experts as experts
    import serving.workbench.gpu.prefill as prefill

    def median_ms(bench: Any, run: Callable[[], object]) -> float:
        """Compute takes longer than its copies, or else the overlapped arms are refused."""
        original(bench, run)
        return 1.0 if isinstance(run, partial) else 0.4

    original = prefill._median_ms
    prefill._median_ms = median_ms
    experts._check_equal = lambda *_: None


def _first_row(tiles: Any, most: int) -> Tensor:
    """Instead of `some_rows`, which loops over counts that a kernel wrote."""
    return torch.zeros(1, dtype=torch.int64, device=tiles.table.device)


class _ZerosOnHost:
    """A step's tokens when they have come: all 0, as what is there may be no token."""

    def __init__(self, copy: Any) -> None:
        self._copy = copy

    def wait(self) -> Tensor:
        return torch.zeros_like(self._copy.wait())


def _names(item: pytest.Item) -> set[str]:
    return {f"{item.path.name}::{name}" for name in (item.name, getattr(item, "originalname", item.name))}


def _write_counts() -> None:
    if COUNTS in os.environ:
        Path(os.environ[COUNTS]).write_text(json.dumps(summary(counts())), encoding="utf-8")


def pytest_configure() -> None:
    mute()
    compare_launches()


def pytest_sessionfinish() -> None:
    _write_counts()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if _names(item) & LEFT_OUT.keys()]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except AssertionError:
        if not _names(pyfuncitem) & UNTIL_NUMBERS.keys():
            raise
        return True


def main(arguments: list[str]) -> None:
    """Run a module of the benchmarks; its exit status is kept."""
    mute()
    compare_launches()
    _mute_benchmarks()
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__")
    finally:
        _write_counts()


if __name__ == "__main__":
    main(sys.argv[1:])
