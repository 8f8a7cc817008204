"""The SM budget: how many of a GPU's streaming multiprocessors are left to communication kernels.

A communication kernel that starts late waits for SMs that persistent GEMMs hold; one that takes too many slows those
down. A schedule with `comm_sms` shares the SMs out, but only kernels that take a number of SMs can keep to it:

    budget = current_sm_budget()
    if budget is not None:
        launch(num_sms=budget.compute)      or budget.comm, for a transport
        report_sm_use("my_gemm", obeys=True)

Without a budget no SM is idle while nothing travels. The grouped GEMM's programs then take tile by tile what no other
has (`moe.kernels.grouped_gemm`), so that no tile waits for an SM that a transport holds.

Who kept to it is in `UBatchWrapper.statistics().sm_budget`. Kernels that a captured graph replays keep the budget that
they were captured with.

Source: DeepEP's `Buffer.set_num_sms`; SGLang's `num_sms` of its single-batch overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ubatch.errors import ConfigError
from ubatch.streams.streams import StreamBackend

__all__ = ["SMBudget", "merge_sm_use", "share_out_sms"]


@dataclass(frozen=True)
class SMBudget:
    """A device's SMs, shared out.

    Attributes:
        total: what the device has.
        comm: what communication kernels may take, at least 1 and less than all.

    Raises:
        ConfigError: nothing is left for one of the two.
    """

    total: int
    comm: int

    def __post_init__(self) -> None:
        if not 0 < self.comm < self.total:
            raise ConfigError(
                f"comm_sms is {self.comm}, but must be 1 to {self.total - 1} on a device with {self.total} streaming "
                "multiprocessors, or 0 to share all of them."
            )

    @property
    def compute(self) -> int:
        """What is left to compute kernels."""
        return self.total - self.comm


def merge_sm_use(users: dict[str, bool], *reports: Mapping[str, bool]) -> None:
    """Add reports to what is known; whoever ever took more than its share does not obey."""
    for report in reports:
        for user, obeys in list(report.items()):
            users[user] = obeys and users.get(user, True)


def share_out_sms(comm_sms: int, streams: StreamBackend) -> SMBudget | None:
    """The budget of a step whose schedule reserves `comm_sms`; None if it reserves none, or the device has no SMs.

    Raises:
        ConfigError: the device has too few.
    """
    total = streams.sm_count() if comm_sms else 0
    return SMBudget(total, comm_sms) if total else None
