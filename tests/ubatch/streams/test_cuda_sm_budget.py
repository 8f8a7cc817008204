"""The SM budget: when there is one, which kernels keep to it, and what is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from fake_cuda import FakeCuda
from torch import Tensor, nn
from wrapping import wrapped

from ubatch import ConfigError, Schedule, UBatchConfig, current_sm_budget, dbo_yield, get_schedule, report_sm_use
from ubatch.streams.streams import NullStreams, SMBudget, share_out_sms


class Kernels(nn.Module):
    """One kernel that takes its share, one that cannot be told, one that learns it late."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[SMBudget | None] = []
        self.seen = lambda: seen  # a function is no state of the module

    def forward(self, x: Tensor) -> Tensor:
        self.seen().append(current_sm_budget())
        report_sm_use("persistent_gemm", obeys=True)
        report_sm_use("library_gemm", obeys=False)
        report_sm_use("sometimes", obeys=len(self.seen()) % 2 == 0)
        dbo_yield()
        return x + 1


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda(sms=132).installed() as found:
        yield found


def overlapped(
    model: nn.Module, schedule: Schedule | str = "mlp_shared_overlap", comm_sms: int | None = None
) -> Mapping[str, bool]:
    """What two overlapped calls say about their SM use."""
    with wrapped(model, schedule=schedule, comm_sms=comm_sms) as wrapper:
        for _ in range(2):
            wrapper(torch.zeros(4, 2))
        assert wrapper.statistics().engaged == 2
        return wrapper.statistics().sm_budget


def test_lanes_share_out_the_sms(cuda: FakeCuda) -> None:
    model = Kernels()
    assert overlapped(model, comm_sms=20) == {"persistent_gemm": True, "library_gemm": False, "sometimes": False}
    assert (model.seen(), model.seen()[0].compute) == ([SMBudget(132, 20)] * 4, 112)


def test_the_schedules_own_and_the_settings_over_it(cuda: FakeCuda) -> None:
    schedule = Schedule("mine", comm_sms=16)
    for comm_sms, expected in ((None, 16), (24, 24)):
        model = Kernels()
        overlapped(model, schedule, comm_sms)
        assert {budget.comm for budget in model.seen()} == {expected}
    model = Kernels()
    assert (overlapped(model, schedule, 0), model.seen()) == ({}, [None] * 4)


def test_nothing_to_share_out_on_a_cpu() -> None:
    model = Kernels()
    assert (overlapped(model, comm_sms=20), model.seen()) == ({}, [None] * 4)
    assert share_out_sms(20, NullStreams()) is None


def test_outside_a_lane_there_is_none() -> None:
    report_sm_use("anybody", obeys=False)
    assert current_sm_budget() is None


def test_what_leaves_nothing_is_refused_before_a_lane_starts(cuda: FakeCuda) -> None:
    model = Kernels()
    with pytest.raises(ConfigError, match=r"comm_sms is 132, but must be 1 to 131 on a device with 132"):
        overlapped(model, comm_sms=132)
    assert not model.seen()
    with pytest.raises(ConfigError, match="comm_sms must be at least 0, not -1"):
        UBatchConfig(verify="off", comm_sms=-1)
    with pytest.raises(ConfigError, match="comm-sms must be int or None, not 'all'"):
        UBatchConfig.from_mapping({"comm-sms": "all"})


def test_ranks_compare_it() -> None:
    schedule = get_schedule("two_batch_decode")
    assert "SMs" not in schedule.describe()
    assert replace(schedule, comm_sms=8).describe().endswith(", 8 SMs for communication")
