"""`--dbo-auto` on a GPU: a step's time is the device's, and nobody waits for it."""

from __future__ import annotations

import time

import pytest
import torch

from model_runner.auto.dbo_auto import DboAuto
from model_runner.step.dp import BatchShape
from ubatch import Decision, ForwardMode, UBatchConfig, fingerprint

pytestmark = pytest.mark.gpu

STEPS = 41  # some exchanges at first, then one of 32 steps: all but the last four are told
PRODUCTS = 200


def test_times_are_the_devices_own() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(2048, 2048, device=device)
    shape = BatchShape([1] * 64, ForwardMode.DECODE)
    decision = Decision(False, None, None, ((64,),), modes=(fingerprint(ForwardMode.DECODE),))
    auto = DboAuto(UBatchConfig(), None, device)

    def forward() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    forward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        auto.settings(shape)
        with auto.timed(decision):
            forward()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    for _ in range(2):  # the steps that are old enough are told, and learned before the next vote
        auto.settings(shape)
    told = auto.statistics()
    assert told.steps == STEPS
    assert told.seconds == pytest.approx(wall * (STEPS - 4) / STEPS, rel=0.35)
