"""Cells to measure (a kind of step, and its tokens on every rank), and the arms to compare in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.workbench.arms.cost_table import SERIAL_ARM
from ubatch import SCHEDULES, Schedule, UBatchConfig
from ubatch.schedules.schedule import SERIAL


@dataclass(frozen=True)
class Cell:
    """One kind of step (`decode`, `prefill` or `verify`) with so many tokens on every rank."""

    mode: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.mode}/{self.tokens}"


@dataclass(frozen=True)
class Grid:
    """Sizes and shapes of the synthetic steps.

    Attributes:
        max_decode_tokens: requests of the largest decode step; tokens of the largest verify step.
        max_prefill_tokens: tokens of the largest prefill step.
        context: tokens that a decoding request has in the cache.
        prompt_len: tokens of a prompt; a prefill step has as many as fit.
        drafts: per request of a verify step.
    """

    modes: tuple[str, ...]
    max_decode_tokens: int
    max_prefill_tokens: int
    context: int
    prompt_len: int
    drafts: int

    def cells(self) -> list[Cell]:
        """Cells with powers of two as tokens, the largest first: they take the most time, so every round has them."""
        smallest = {"decode": 2, "prefill": 16, "verify": 2 * (self.drafts + 1)}
        largest = {
            "decode": self.max_decode_tokens,
            "prefill": self.max_prefill_tokens,
            "verify": self.max_decode_tokens,
        }
        return [
            Cell(mode, 1 << power)
            for mode in self.modes
            for power in reversed(range(32))
            if smallest[mode] <= 1 << power <= largest[mode]
        ]


@dataclass(frozen=True)
class Arm:
    """A way to run a step: a schedule with its lanes, and a name of its own."""

    name: str
    schedule: Schedule

    @property
    def is_serial(self) -> bool:
        """Whether nothing overlaps."""
        return self.name == SERIAL_ARM

    @property
    def complexity(self) -> tuple[int, int]:
        """Of two equally fast arms, the one with the lower complexity is chosen."""
        return self.schedule.lanes * self.schedule.chunks, self.schedule.lanes


def library_arms(lanes: Sequence[int], *, chunks: bool) -> list[Arm]:
    """Serial; single-batch if the transport can be cut into chunks; the default schedule with each number of lanes."""
    arms = [Arm(SERIAL_ARM, SERIAL)]
    if chunks:
        arms.append(Arm("single_batch", SCHEDULES["single_batch"]))
    default = SCHEDULES["mlp_shared_overlap"]
    return arms + [Arm(f"{default.name} x{count}", default.with_lanes(count)) for count in lanes]


def arm_config(base: UBatchConfig, schedule: Schedule) -> UBatchConfig:
    """Settings that run every step under this schedule, if the step allows it."""
    lowest = max(2, schedule.lanes)
    return replace(
        base,
        enable_dbo=schedule.overlaps,
        schedule=schedule,
        schedules={},
        num_ubatches=lowest,
        dbo_decode_token_threshold=lowest,
        dbo_prefill_token_threshold=lowest,
        modes={},
    )
