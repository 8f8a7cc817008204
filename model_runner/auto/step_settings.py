"""Which steps overlap, decided while serving, from the steps themselves: `--enable-dbo` without a threshold.

    settings      what this rank votes with: its settings, whether the `Policy` declines the step, and what an earlier
                  step took (`step_stages.row`), which thus reaches all ranks without an exchange of its own
    timed         learns from what the ranks told each other in the vote, then times the step's forward and transfers

A step's time covers its forward and logits: on a GPU it is taken between two events of the stream, without a wait.
There, and with CUDA graphs, the host does not see the transfers, so only trials tell.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_stages import Stages, row
from model_runner.step.step import Step
from ubatch import CommGroup, Decision, ForwardMode, ModeSettings, UBatchConfig, fingerprint
from ubatch.process import num_cores
from ubatch.ranks import Connection, record_transfers
from ubatch.schedules import MODE_KEYS, mode_key

_logger = logging.getLogger(__name__)

_IN_FLIGHT = 4
"""On a GPU the times of the latest four steps are not read: they may still be running."""
_MODES = {"decode": ForwardMode.DECODE, "prefill": ForwardMode.PREFILL, "verify": ForwardMode.TARGET_VERIFY}
_KINDS = {fingerprint(mode): kind for kind, mode in _MODES.items()}
_Taken = tuple[Seen, Callable[[], tuple[int, ...]]]


class Proposal(NamedTuple):
    """What a rank votes with.

    Attributes:
        settings: None for the runner's own.
        no_gain: the step is declined, because no gain is expected.
        told: numbers for the other ranks, `Offer.told`.
    """

    settings: UBatchConfig | None = None
    no_gain: bool = False
    told: tuple[int, ...] = ()


class StepSettings:
    """Decides for every step without a threshold whether it overlaps, under the schedule of its kind.

    Args:
        config: the runner's. Nothing is decided for a kind of step with a threshold of its own there (`ubatch tune`
            writes them), or with a serial schedule; or at all, where overlap is switched off or required.
        group: the ranks that vote; None for a single rank.
        device: where steps run.
        kinds: the kinds of steps to decide on: `decode`, `prefill`, `verify`.

    Attributes:
        policy: the decisions, with numbers.
    """

    def __init__(
        self, config: UBatchConfig, group: CommGroup | None, device: torch.device, kinds: Sequence[str] = MODE_KEYS
    ) -> None:
        self._group = group
        self._device = device
        self._shared_cores = num_cores() <= torch.get_num_threads()
        may = config.enable_dbo and not config.require_overlap
        free = [kind for kind in kinds if may and config.modes.get(kind, ModeSettings()).token_threshold is None]
        schedules = {kind: config.for_mode(_MODES[kind]).schedule for kind in free}
        self._schedules = {kind: each for kind, each in schedules.items() if each.overlaps}
        own = {
            kind: ModeSettings(each, each.lanes if each.lanes > 1 else None, token_threshold=each.lanes)
            for kind, each in self._schedules.items()
        }
        self._settings = replace(config, modes={**config.modes, **own}) if own else None
        self._connection: Connection | None = None
        self._restart()

    def _restart(self) -> None:
        self.policy = Policy(self._schedules)
        # What the latest steps were and took; None for those that were not timed, or failed. The first is told next.
        kept = 1 + (_IN_FLIGHT if self._device.type == "cuda" else 0)
        self._taken: deque[_Taken | None] = deque([None] * kept, kept)

    def settings(self, step: Step) -> Proposal:
        """What this rank votes with for a step.

        Raises:
            GroupBroken: a rank has failed since the group's last `reset()`.
        """
        if not self._schedules:
            return Proposal()
        self._follow_group()
        due = self._taken[0]
        tokens, kind = step.num_tokens, mode_key(step.mode)
        declined = bool(tokens) and kind in self._schedules and not self.policy.overlaps(kind, tokens)
        return Proposal(self._settings, declined, () if due is None else due[1]())

    @contextmanager
    def timed(self, decision: Decision) -> Iterator[None]:
        """Learns from the vote, and times the `with` block: forward and logits of the step that was voted on. Not used
        when all ranks are idle."""
        if not self._schedules:
            yield
            return
        self._learn(decision)
        step = self.policy.saw(*self._seen(decision))
        self._taken.append(None)
        if step is None:
            yield
        elif self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._taken[-1] = step, lambda: row(_elapsed_s(begin, end))
        else:
            start, begun = time.perf_counter(), time.monotonic()
            with record_transfers() as arrivals:
                yield
            told = row(time.perf_counter() - start, begun, arrivals, shared_cores=self._shared_cores)
            self._taken[-1] = step, lambda: told

    def reasons(self) -> Mapping[str, str]:
        """Kind of step -> a sentence: the decision and its reason; empty if nothing is decided."""
        return self.policy.reasons

    def _follow_group(self) -> None:
        """Restarts on a new connection: after a failure the ranks' step counts may differ."""
        if self._group is None or self._group.size == 1:
            return
        connection = self._group.usable_connection()
        if self._connection is not None and self._connection is not connection:
            self._restart()
        self._connection = connection

    def _learn(self, decision: Decision) -> None:
        taken, stages = self._taken[0], Stages.of(decision.told)
        if taken is None or stages is None or not stages.seconds > 0:
            return
        kind = taken[0].kind
        if self.policy.learn(taken[0], stages) and (self._group is None or self._group.rank == 0):
            _logger.info("overlap of %s steps, %s", kind, self.policy.reasons[kind])

    def _seen(self, decision: Decision) -> tuple[str, int, bool]:
        """What `Policy.saw` gets."""
        tokens = [total for total in map(sum, decision.tokens) if total]
        modes = {mode for mode, counts in zip(decision.modes, decision.tokens, strict=True) if any(counts)}
        kind = _KINDS.get(modes.pop(), "") if len(modes) == 1 else ""
        schedule = self._schedules.get(kind)
        known = not decision.engaged or (schedule is not None and decision.schedule == schedule.fingerprint)
        return kind if known else "", sum(tokens) // len(tokens), decision.engaged


def _elapsed_s(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
