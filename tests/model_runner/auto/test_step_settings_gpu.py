"""`--enable-dbo` on a GPU: a step's time is the device's, and nobody waits for it."""

import math
import time

import pytest
import torch

from model_runner.auto.step_settings import StepSettings
from tests.support.shaped_steps import shaped_step
from ubatch import Decision, ForwardMode, UBatchConfig, fingerprint

pytestmark = pytest.mark.gpu

STEPS = 41
PRODUCTS = 200


def test_times_are_the_devices_own() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(2048, 2048, device=device)
    shape = shaped_step([1] * 64, ForwardMode.DECODE)
    auto = StepSettings(UBatchConfig(), None, device)

    def forward() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    forward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        told = auto.settings(shape).told
        modes = (fingerprint(ForwardMode.DECODE),)
        with auto.timed(Decision(False, None, None, ((64,),), modes=modes, told=(told,))):
            forward()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    found = auto.policy
    assert found.timed > 5
    assert math.exp(found.kinds["decode"].sizes[64].seconds.value) == pytest.approx(wall / STEPS, rel=0.35)
