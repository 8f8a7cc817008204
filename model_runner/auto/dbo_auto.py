"""Which steps overlap, decided while serving, from the steps themselves: `--enable-dbo`, and `--dbo-auto`.

    settings      the settings this rank votes with: those of the arm that the `Policy` chooses for the step
    timed         times the forward of a step after the vote, and its transfers
    exchange      every 16 steps the ranks exchange what four of them took, in one small all-reduce beside the vote's;
                  while something is new, of every step before the next vote; the policy decides the same on every rank

A step's time covers its forward and logits: on a GPU it is taken between two events of the stream, without a wait.
There, and with CUDA graphs, the host does not see the transfers, so only trials tell.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from model_runner.auto.dbo_policy import Policy, PolicyStatistics, Seen
from model_runner.auto.step_stages import ROW, Stages, row
from model_runner.parallel.transport import most_chunks
from model_runner.step.dp import BatchShape
from moe import All2All
from ubatch import SCHEDULES, CommGroup, ConfigError, Decision, ForwardMode, Schedule, UBatchConfig, fingerprint
from ubatch.ranks.connection import Connection
from ubatch.ranks.transfer_times import Arrival, record_transfers
from ubatch.schedules.cost_table import SERIAL_ARM
from ubatch.schedules.modes import MODE_KEYS, ModeSettings, mode_key

__all__ = ["DboAuto", "FixedSettings", "StepSettings", "make_step_settings"]

_logger = logging.getLogger(__name__)

_MOST_LANES = 4
_IN_FLIGHT = 4
"""On a GPU the times of the latest four steps are not read: they may still be running."""
_CHUNKS = 2
_MODES = {"decode": ForwardMode.DECODE, "prefill": ForwardMode.PREFILL, "verify": ForwardMode.TARGET_VERIFY}
_KINDS = {fingerprint(mode): kind for kind, mode in _MODES.items()}
_OTHER = "other"
_Told = Callable[[], tuple[list[float], int]]
"""A step's row of numbers for the other ranks, and its number of combines; see `model_runner.auto.step_stages`."""


class StepSettings(Protocol):
    """Gives the settings that this rank votes with for a step."""

    def settings(self, batch: BatchShape) -> tuple[UBatchConfig | None, bool]:
        """Settings for this rank's next vote, None for the runner's own; and whether the step is declined, because no
        gain is expected."""

    def timed(self, decision: Decision) -> AbstractContextManager[None]:
        """Times the `with` block: forward and logits of a step after its vote. Not used when all ranks are idle."""

    def reasons(self) -> Mapping[str, str]:
        """Kind of step -> a sentence: the decision and its reason; empty if nothing is decided."""

    def statistics(self) -> PolicyStatistics | None:
        """The decisions, with numbers; None if nothing is decided."""


class FixedSettings:
    """The runner's own settings for every step."""

    def settings(self, batch: BatchShape) -> tuple[None, bool]:
        """See `StepSettings`."""
        return None, False

    def timed(self, decision: Decision) -> AbstractContextManager[None]:
        """See `StepSettings`."""
        return nullcontext()

    def reasons(self) -> Mapping[str, str]:
        """See `StepSettings`."""
        return {}

    def statistics(self) -> PolicyStatistics | None:
        """See `StepSettings`."""
        return None


def make_step_settings(
    config: UBatchConfig,
    group: CommGroup | None,
    device: torch.device,
    transport: All2All,
    *,
    kinds: Sequence[str] = (),
    explore: bool = False,
    linear_layers: Collection[int] = (),
) -> StepSettings:
    """A `DboAuto` for `kinds`, or with `explore` for all; fixed settings if there is nothing to decide.

    Raises:
        ConfigError: see `DboAuto`; with `explore` only.
    """
    if explore:
        return DboAuto(config, group, device, max_chunks=most_chunks(transport), linear_layers=linear_layers)
    kinds = [kind for kind in kinds if _arms(config, kind, 0) and not _has_threshold(config, kind)]
    if not kinds or not config.enable_dbo or config.require_overlap:
        return FixedSettings()
    return DboAuto(config, group, device, explore=False, kinds=kinds, linear_layers=linear_layers)


class DboAuto:
    """Chooses the arm of every step whose threshold is not given.

    The arms of a kind are serial and its schedule; with `explore` also its schedule with one lane more, single-batch
    overlap, and its schedule with two chunks.

    Args:
        config: the runner's; gives schedules, lanes, the way to split, and thresholds per mode. A kind with a threshold
            there (`ubatch tune` writes them) keeps it.
        group: the ranks that vote; None for a single rank.
        device: where steps run.
        max_chunks: blocks of experts that the transport can signal separately; chunks need two.
        explore: see above.
        kinds: the kinds of steps to decide on.
        linear_layers: places of the layers with linear attention among the MoE layers.
        policy: makes the `Policy`, at the start and at every restart.

    Raises:
        ConfigError: overlap is switched off or required, or no kind has a schedule that overlaps.
    """

    def __init__(
        self,
        config: UBatchConfig,
        group: CommGroup | None,
        device: torch.device,
        *,
        max_chunks: int = 1,
        explore: bool = True,
        kinds: Sequence[str] = MODE_KEYS,
        policy: Callable[[Mapping[str, Mapping[str, Schedule]]], Policy] = Policy,
        linear_layers: Collection[int] = (),
    ) -> None:
        if not config.enable_dbo:
            raise ConfigError("dbo_auto decides when steps overlap, but enable_dbo is off. Switch it on.")
        if config.require_overlap:
            raise ConfigError("dbo_auto runs some steps serially, but require_overlap is set. Unset it.")
        self._group = group
        self._device = device
        self._in_flight = _IN_FLIGHT if device.type == "cuda" else 0
        self._shared_cores = len(os.sched_getaffinity(0)) <= torch.get_num_threads() if _HAS_AFFINITY else True
        self._make_policy = policy
        self._linear_layers = frozenset(linear_layers)
        most = max_chunks if explore else 0
        free = [kind for kind in kinds if not _has_threshold(config, kind)]
        self._arms = {kind: arms for kind in free if (arms := _arms(config, kind, most))}
        if not self._arms:
            raise ConfigError(
                "dbo_auto needs a kind of step with a schedule that overlaps and without a threshold of its own, but "
                "there is none. Unset dbo_auto, or the thresholds."
            )
        every = [each for arms in self._arms.values() for each in arms.values()]
        named = {each.name: each for each in every if each.name not in SCHEDULES}  # an idle rank must know them
        self._config = replace(config, schedules={**config.schedules, **named})
        self._made: dict[tuple[str, str], UBatchConfig] = {}
        self._connection: Connection | None = None
        self._asked: tuple[dict[int, tuple[Seen, int]], Callable[[], list[list[float]]]] | None = None
        self._restart()

    def arms(self, kind: str) -> Mapping[str, Schedule]:
        """Name -> schedule of the arms of this kind beside the serial one; empty if nothing is decided for it."""
        return dict(self._arms.get(kind, {}))

    def settings(self, batch: BatchShape) -> tuple[UBatchConfig, bool]:
        """See `StepSettings`. Exchanges step times when enough are collected.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as in a vote.
        """
        self._follow_group()
        self._learn()
        if self._policy.wants_times(len(self._running) - self._in_flight):
            self._exchange()
            if self._policy.eager:
                self._learn()
        tokens, kind = sum(batch.query_lens), mode_key(batch.mode)
        if not tokens or kind not in self._arms:
            return self._config, False
        arm = self._policy.arm(kind, tokens)
        if arm == SERIAL_ARM:
            return self._config, True
        return self.arm_settings(kind, arm), False

    def arm_settings(self, kind: str, arm: str) -> UBatchConfig:
        """Settings that run every step of this kind in this arm (one of `arms`) where it can.

        Raises:
            ConfigError: the kind has no such arm.
        """
        schedule = self.arms(kind).get(arm)
        if schedule is None:
            raise ConfigError(f"{kind} steps have no arm {arm!r}. They have: {', '.join(self.arms(kind)) or 'none'}.")
        if (kind, arm) not in self._made:
            lanes = None if schedule.lanes == 1 else schedule.lanes
            own = ModeSettings(schedule, lanes, token_threshold=schedule.lanes)
            self._made[kind, arm] = replace(self._config, modes={**self._config.modes, kind: own})
        return self._made[kind, arm]

    @contextmanager
    def timed(self, decision: Decision) -> Iterator[None]:
        """See `StepSettings`."""
        seen = self._seen(decision)
        number = self._policy.saw(seen)
        if number is None:
            yield
            return
        self._running[number] = seen, _unknown
        with self._clock() as told:
            yield
        self._running[number] = seen, told

    def reasons(self) -> Mapping[str, str]:
        """See `StepSettings`."""
        return self._policy.reasons

    def statistics(self) -> PolicyStatistics:
        """See `StepSettings`."""
        return self._policy.statistics()

    # -- the ranks ---------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._arm_of = {
            (kind, fingerprint(schedule.describe())): arm
            for kind, arms in self._arms.items()
            for arm, schedule in arms.items()
        }
        self._policy = self._make_policy(self._arms)
        self._running: dict[int, tuple[Seen, _Told]] = {}
        self._asked = None

    def _follow_group(self) -> None:
        """Restarts on a new connection: after a failure the ranks' step counts may differ."""
        if self._group is None or self._group.size == 1:
            return
        connection = self._group.usable_connection()
        if self._connection is not None and self._connection is not connection:
            self._restart()
        self._connection = connection

    def _exchange(self) -> None:
        """Starts the exchange, on every rank before the same vote; `_learn` reads the result."""
        numbers = sorted(self._running)[: len(self._running) - self._in_flight]
        steps, rows = {}, []
        for number in numbers:
            seen, told = self._running.pop(number)
            numbers_told, layers = told()
            steps[number] = seen, layers
            rows.append(numbers_told)
        self._asked = steps, self._largest(rows)

    def _learn(self) -> None:
        """Learns from the times of the exchange that was started last, if there is one."""
        if self._asked is None:
            return
        (steps, wait), self._asked = self._asked, None
        changed = self._policy.learn(
            {
                number: (seen, Stages.of(values, layers, self._linear_layers))
                for (number, (seen, layers)), values in zip(steps.items(), wait(), strict=True)
            }
        )
        for kind in changed if self._group is None or self._group.rank == 0 else ():
            _logger.info("overlap of %s steps, %s", kind, self._policy.reasons[kind])

    def _largest(self, rows: list[list[float]]) -> Callable[[], list[list[float]]]:
        """Starts an all-reduce of each entry's largest value; the returned function waits for the result."""
        connection = self._connection
        if connection is None:
            return lambda: rows
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(table, dist.ReduceOp.MAX, group=connection.vote_pg, async_op=True)

        def wait() -> list[list[float]]:
            connection.wait_for_works((work,), "step times")
            found: list[list[float]] = table.tolist()
            return found

        return wait

    @contextmanager
    def _clock(self) -> Iterator[_Told]:
        """Yields a function that tells what the `with` block took; call it after the block."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield lambda: ([_elapsed_s(begin, end), *(0.0,) * (ROW - 1)], 0)
            end.record()
            return
        start, begun = time.perf_counter(), time.monotonic()
        seconds: list[float] = []
        arrivals: list[Arrival]
        with record_transfers() as arrivals:
            yield lambda: row(
                seconds[0], begun, arrivals, shared_cores=self._shared_cores, linear_layers=self._linear_layers
            )
            seconds.append(time.perf_counter() - start)

    def _seen(self, decision: Decision) -> Seen:
        tokens = [total for total in map(sum, decision.tokens) if total]
        modes = {mode for mode, counts in zip(decision.modes, decision.tokens, strict=True) if any(counts)}
        kind = _KINDS.get(modes.pop(), _OTHER) if len(modes) == 1 else _OTHER
        arm = self._arm_of.get((kind, decision.schedule), _OTHER) if decision.engaged else SERIAL_ARM
        return Seen(kind, sum(tokens) // len(tokens), arm)


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def _has_threshold(config: UBatchConfig, kind: str) -> bool:
    own = config.modes.get(kind)
    return own is not None and own.token_threshold is not None


def _arms(config: UBatchConfig, kind: str, max_chunks: int) -> dict[str, Schedule]:
    """Name -> schedule, the simplest first; empty if the kind's schedule is serial.

    Args:
        max_chunks: chunks that the transport takes; 0 for the kind's own schedule only.
    """
    own = config.for_mode(_MODES[kind]).schedule
    if not own.overlaps:
        return {}
    found = [own]
    if max_chunks and own.lanes > 1:
        found += [own.with_lanes(own.lanes + 1)] if own.lanes < _MOST_LANES else []
        if max_chunks >= _CHUNKS:
            found += [SCHEDULES["single_batch"]]
            found += [replace(own, name=f"{own.name}_{_CHUNKS}_chunks", chunks=_CHUNKS)] if own.chunks == 1 else []
    return {(f"{each.name} in {each.lanes} lanes" if each.lanes > 1 else each.name): each for each in found}


def _unknown() -> tuple[list[float], int]:
    """Of a step that failed: its time of 0 is ignored."""
    return [0.0] * ROW, 0


def _elapsed_s(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()  # recorded several steps ago: no wait in practice
    return float(begin.elapsed_time(end)) * 1e-3
