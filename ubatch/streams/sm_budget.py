"""The SM budget: how many of a GPU's streaming multiprocessors are reserved for communication kernels.

A communication kernel that starts late waits for SMs that persistent GEMMs hold; one that takes too many SMs slows the
GEMMs down. A schedule with `comm_sms` divides the SMs, but only kernels with an adjustable number of SMs can obey:

    budget = current_sm_budget()
    if budget is not None:
        launch(num_sms=budget.compute)      or budget.comm, for a transport
        report_sm_use("my_gemm", obeys=True)

Without a budget no SM is reserved. The programs of the grouped GEMM then take the next free tile dynamically
(`moe.kernels.grouped_gemm`), so that no tile waits for an SM that a transport holds.

`UBatchWrapper.statistics().sm_budget` tells which kernels obeyed. Kernels in a captured graph keep the budget of the
capture.

Source: DeepEP's `Buffer.set_num_sms`; SGLang's `num_sms` of its single-batch overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ubatch.errors import ConfigError
from ubatch.streams.streams import StreamBackend


@dataclass(frozen=True)
class SMBudget:
    """A device's SMs, divided between compute and communication.

    Attributes:
        total: SMs of the device.
        comm: SMs that communication kernels may take, at least 1 and less than `total`.

    Raises:
        ConfigError: no SM is left for one of the two.
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
        """SMs for compute kernels."""
        return self.total - self.comm


def merge_sm_use(users: dict[str, bool], *reports: Mapping[str, bool]) -> None:
    """Merge reports into `users`; a kernel that once took more than its share stays False."""
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
