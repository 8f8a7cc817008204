"""`--dbo-auto` measures, before the first request and while serving, when overlapping a step pays.

    measured      times a step before serving, in the arm that `arm_settings` asks for
    begin         chooses the first settings from these measurements
    settings      the settings this rank votes with: the schedule and threshold in use, or those of a trial
    timed         times the forward of a step after the vote
    every 64 steps, and soon after an early trial, the ranks exchange the times of their steps in one small all-reduce
    beside the vote's; the slowest rank's times go to the `Policy`, which decides the same on every rank

A step's time covers its forward and logits: on a GPU it is taken between two events of the stream, without a wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from model_runner.auto.dbo_model import Seen
from model_runner.auto.dbo_policy import Policy, PolicyStatistics
from model_runner.parallel.transport import most_chunks
from model_runner.step.dp import BatchShape
from moe import All2All
from ubatch import SCHEDULES, CommGroup, ConfigError, Decision, ForwardMode, Schedule, UBatchConfig, fingerprint
from ubatch.ranks.connection import Connection
from ubatch.schedules.cost_table import SERIAL_ARM, Setting
from ubatch.schedules.modes import MODE_KEYS, ModeSettings, mode_key

__all__ = ["DboAuto", "FixedSettings", "StepSettings", "make_step_settings"]

_logger = logging.getLogger(__name__)

_MOST_LANES = 4
_EXCHANGE_STEPS = 64
_IN_FLIGHT = 4
"""On a GPU the times of the latest four steps are not read: they may still be running."""
_NEVER = 2**62
_MODES = {"decode": ForwardMode.DECODE, "prefill": ForwardMode.PREFILL, "verify": ForwardMode.TARGET_VERIFY}
_KINDS = {fingerprint(mode): kind for kind, mode in _MODES.items()}
_OTHER = "other"
_Seconds = Callable[[], float]


class StepSettings(Protocol):
    """Gives the settings that this rank votes with for a step."""

    def settings(self, batch: BatchShape) -> UBatchConfig | None:
        """Settings for this rank's next vote; None for the runner's own settings."""

    def timed(self, decision: Decision) -> AbstractContextManager[None]:
        """Times the `with` block: forward and logits of a step after its vote. Not used when all ranks are idle."""

    def reasons(self) -> Mapping[str, str]:
        """Kind of step -> a sentence: the decision and its reason; empty if nothing is decided."""

    def statistics(self) -> PolicyStatistics | None:
        """The decisions, with numbers; None if nothing is decided."""


class FixedSettings:
    """The runner's own settings for every step."""

    def settings(self, batch: BatchShape) -> None:
        """See `StepSettings`."""

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
    config: UBatchConfig, group: CommGroup | None, device: torch.device, transport: All2All, *, auto: bool
) -> StepSettings:
    """Fixed settings, or with `auto` a `DboAuto`.

    Raises:
        ConfigError: see `DboAuto`.
    """
    if not auto:
        return FixedSettings()
    return DboAuto(config, group, device, max_chunks=most_chunks(transport))


class DboAuto:
    """Chooses the settings of every step.

    A mode with a threshold in `config.modes` (`ubatch tune` writes them) begins with it. The others begin with the best
    arm that was `measured`, or serially if none was. The arms of a mode are its schedule with its number of lanes, the
    same with one lane more, single-batch overlap, and those that `add_arm` adds.

    Args:
        config: the runner's; gives schedules, lanes and the way to split.
        group: the ranks that vote; None for a single rank.
        device: where steps run.
        max_chunks: blocks of experts that the transport can signal separately; single-batch overlap needs two.
        policy: makes the `Policy`, at the start and at every restart; by default with the default budget.

    Raises:
        ConfigError: overlap is switched off or required, or no mode has a schedule that overlaps.
    """

    def __init__(
        self,
        config: UBatchConfig,
        group: CommGroup | None,
        device: torch.device,
        *,
        max_chunks: int = 1,
        policy: Callable[[Mapping[str, tuple[str, ...]], Mapping[str, Setting]], Policy] = Policy,
    ) -> None:
        if not config.enable_dbo:
            raise ConfigError("dbo_auto decides when steps overlap, but enable_dbo is off. Switch it on.")
        if config.require_overlap:
            raise ConfigError("dbo_auto runs some steps serially, but require_overlap is set. Unset it.")
        self._config = config
        self._group = group
        self._device = device
        self._in_flight = _IN_FLIGHT if device.type == "cuda" else 0
        self._make_policy = policy
        self._schedules = {kind: _arms(config, kind, max_chunks) for kind in MODE_KEYS}
        self._schedules = {kind: arms for kind, arms in self._schedules.items() if arms}
        if not self._schedules:
            raise ConfigError("dbo_auto needs a schedule that overlaps, but that of every mode is serial.")
        self._made: dict[tuple[tuple[str, Setting], ...], UBatchConfig] = {}
        self._connection: Connection | None = None
        self._asked: tuple[Mapping[int, Seen], Callable[[], list[float]]] | None = None
        self._before: list[tuple[Seen, _Seconds]] = []
        self._known: list[tuple[Seen, float]] = []
        self._restart()

    def arms(self, kind: str) -> Mapping[str, Schedule]:
        """Name -> schedule of the arms of this kind beside the serial one; empty if the kind may not overlap."""
        return dict(self._schedules.get(kind, {}))

    def is_tuned(self, kind: str) -> bool:
        """Whether the settings already have a token threshold for this kind."""
        own = self._config.modes.get(kind)
        return own is not None and own.token_threshold is not None

    def add_arm(self, kind: str, schedule: Schedule) -> None:
        """Adds a schedule to try for a kind that has arms. Call it on every rank. It discards what was learned from
        the load, and what was measured since `begin`.

        Raises:
            ConfigError: the kind has no arms, or has one of this name already.
        """
        arms = self._schedules.get(kind)
        if arms is None or schedule.name in arms:
            raise ConfigError(
                f"{kind} steps cannot get the arm {schedule.name!r}: "
                + ("they do not overlap." if arms is None else "they have one of this name.")
            )
        arms[schedule.name] = schedule
        self._restart()

    def settings(self, batch: BatchShape) -> UBatchConfig:
        """See `StepSettings`. Exchanges step times when enough are collected.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as in a vote.
        """
        self._follow_group()
        self._learn()
        if self._exchange_is_due():
            self._exchange()
        tokens, kind = sum(batch.query_lens), mode_key(batch.mode)
        wanted = {each: self._policy.setting(each, tokens if each == kind else 0) for each in self._schedules}
        key = tuple(wanted.items())
        if key not in self._made:
            self._made[key] = self._with(wanted)
        return self._made[key]

    @contextmanager
    def timed(self, decision: Decision) -> Iterator[None]:
        """See `StepSettings`."""
        seen = self._seen(decision)
        number = self._policy.saw(seen)
        self._running[number] = seen, _unknown
        with self._clock() as seconds:
            yield
        self._running[number] = seen, seconds

    def reasons(self) -> Mapping[str, str]:
        """See `StepSettings`."""
        return self._policy.reasons

    def statistics(self) -> PolicyStatistics:
        """See `StepSettings`."""
        return self._policy.statistics()

    # -- at the start ------------------------------------------------------------------------------------------

    def arm_settings(self, kind: str, arm: str) -> UBatchConfig:
        """Settings that run every step of this kind in this arm (`serial` or one of `arms`) where it can.

        Raises:
            ConfigError: the kind has no such arm.
        """
        if arm == SERIAL_ARM:
            return self._with({kind: Setting()})
        if arm not in self.arms(kind):
            raise ConfigError(f"{kind} steps have no arm {arm!r}. They have: {', '.join(self.arms(kind)) or 'none'}.")
        return self._with({kind: Setting(arm, 1)})

    @contextmanager
    def measured(self, decision: Decision) -> Iterator[_Seconds]:
        """Like `timed`, for a measurement step before serving; `begin` exchanges its time with the other ranks.

        Yields a function to call after the block: it returns this rank's time in seconds.
        """
        self._follow_group()
        with self._clock() as seconds:
            yield seconds
        self._before.append((self._seen(decision), seconds))

    def begin(self) -> None:
        """Exchanges the `measured` times and chooses the first settings. Every rank calls it before serving.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as in a vote.
        """
        self._follow_group()
        if not self._before:
            return
        times = self._slowest([each() for _, each in self._before])()
        self._known += [(seen, value) for (seen, _), value in zip(self._before, times, strict=True) if value > 0]
        self._restart()

    # -- the ranks ---------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._arm_of = {
            (kind, fingerprint(schedule.describe())): arm
            for kind, arms in self._schedules.items()
            for arm, schedule in arms.items()
        }
        start = {}
        for kind, arms in self._schedules.items():
            if self.is_tuned(kind):
                start[kind] = Setting(next(iter(arms)), self._config.modes[kind].token_threshold)
        self._policy = self._make_policy({kind: tuple(arms) for kind, arms in self._schedules.items()}, start)
        if self._known:
            self._policy.measured(self._known)
        self._running: dict[int, tuple[Seen, _Seconds]] = {}
        self._asked = None
        self._before = []

    def _follow_group(self) -> None:
        """Restarts on a new connection: after a failure the ranks' step counts may differ."""
        if self._group is None or self._group.size == 1:
            return
        connection = self._group.usable_connection()
        if self._connection is not None and self._connection is not connection:
            self._restart()
        self._connection = connection

    def _exchange_is_due(self) -> bool:
        """Gives the same answer on every rank: all count the same steps and have learned the same times."""
        old = len(self._running) - self._in_flight
        return old > 0 and (old >= _EXCHANGE_STEPS or self._policy.wants_times(min(self._running) + old))

    def _exchange(self) -> None:
        """Starts the exchange, on every rank before the same vote; `_learn` reads the result before the next vote."""
        numbers = sorted(self._running)[: len(self._running) - self._in_flight]
        told = {number: self._running.pop(number) for number in numbers}
        steps = {number: seen for number, (seen, _) in told.items()}
        self._asked = steps, self._slowest([each() for _, each in told.values()])

    def _learn(self) -> None:
        """Learns from the times exchanged before the previous vote, if there were any."""
        if self._asked is None:
            return
        (steps, wait), self._asked = self._asked, None
        times = dict(zip(steps, wait(), strict=True))
        before = self._policy.statistics().settings
        self._policy.learn({number: (steps[number], value) for number, value in times.items() if value > 0})
        for kind, setting in self._policy.statistics().settings.items():
            if setting != before[kind] and (self._group is None or self._group.rank == 0):
                _logger.info("dbo_auto, %s steps: %s", kind, self._policy.reasons[kind])

    def _slowest(self, seconds: list[float]) -> Callable[[], list[float]]:
        """Starts an all-reduce of each step's time on its slowest rank; the returned function waits for the result."""
        connection = self._connection
        if connection is None:
            return lambda: seconds
        table = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(table, dist.ReduceOp.MAX, group=connection.vote_pg, async_op=True)

        def wait() -> list[float]:
            connection.wait_for_works((work,), "step times")
            found: list[float] = table.tolist()
            return found

        return wait

    @contextmanager
    def _clock(self) -> Iterator[_Seconds]:
        """Yields a function that returns the seconds the `with` block took; call it after the block."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield lambda: _elapsed_s(begin, end)
            end.record()
            return
        start = time.perf_counter()
        times: list[float] = []
        yield lambda: times[0]
        times.append(time.perf_counter() - start)

    def _seen(self, decision: Decision) -> Seen:
        tokens = [total for total in map(sum, decision.tokens) if total]
        modes = {mode for mode, row in zip(decision.modes, decision.tokens, strict=True) if any(row)}
        kind = _KINDS.get(modes.pop(), _OTHER) if len(modes) == 1 else _OTHER
        arm = self._arm_of.get((kind, decision.schedule), _OTHER) if decision.engaged else SERIAL_ARM
        return Seen(kind, min(tokens), max(tokens), arm)

    # -- settings ----------------------------------------------------------------------------------------------

    def _with(self, wanted: Mapping[str, Setting]) -> UBatchConfig:
        modes = dict(self._config.modes)
        for kind, setting in wanted.items():
            arms = self._schedules[kind]
            schedule = arms.get(setting.arm, next(iter(arms.values())))
            threshold = _NEVER if setting.threshold is None else max(setting.threshold, schedule.lanes)
            modes[kind] = ModeSettings(schedule, None if schedule.lanes == 1 else schedule.lanes, threshold)
        return replace(self._config, modes=modes)


def _arms(config: UBatchConfig, kind: str, max_chunks: int) -> dict[str, Schedule]:
    """Name -> schedule, the simplest first; empty if the mode's schedule is serial."""
    own = config.for_mode(_MODES[kind]).schedule
    if own.lanes == 1:
        return {own.name: own} if own.overlaps else {}
    lanes = [own.lanes, *({own.lanes + 1} if own.lanes < _MOST_LANES else ())]
    arms = {f"{own.name} in {count} lanes": own.with_lanes(count) for count in lanes}
    single = SCHEDULES["single_batch"]
    return arms | ({single.name: single} if max_chunks >= single.chunks else {})


def _unknown() -> float:
    """Time of a step that failed: 0, which is ignored."""
    return 0.0


def _elapsed_s(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()  # recorded several steps ago: no wait in practice
    return float(begin.elapsed_time(end)) * 1e-3
