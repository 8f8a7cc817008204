"""When experts change places, and to where: `--enable-eplb`, in the process that has all ranks' loads.

    counted     ranks have told their loads: has balancedness fallen, or is it time? While it falls, time waits
    plan        in a thread: a placement for the last window, if it pays (`moe.balance.decide`); after a fall, for what
                has come since, and again with more of it if it does not pay yet
    send        the order goes to all ranks, which move while they step
    moved       layer by layer the ranks have switched; or they have given up, and experts stay where they are
    restarted   engines that were started again have their first placement: they are sent the one that was in force

One order is under way at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from moe import ExpertPlacement
from moe.balance import PARTS, Decision, EplbConfig, Floats, Ints, MoveCosts, Verdict, decide, has_fallen, with_layers
from serving.balance.load_book import LoadBook
from serving.logs import log_event

_logger = logging.getLogger(__name__)

_LINK_BYTES_PER_S = 1e9
"""Assumed of a link that is not emulated."""
_NEWEST = 3
"""Parts of the window, the newest ones, in which balancedness must have fallen for an early plan."""
_STEP_S = 0.1
"""Assumed of a step before one was measured."""


class MoveReason(StrEnum):
    """Why experts change places."""

    INTERVAL = "interval"
    FALLEN = "fallen"
    """balancedness has fallen before it was time"""
    RESTORED = "restored"
    """engines were started again"""


INTERRUPTED, UNPLANNED = "interrupted", "unplanned"
"""Failures here; ranks have others. An engine has failed; the planner has."""

SendMove = Callable[[int, ExpertPlacement, Sequence[int]], None]
"""Sends an order to all ranks: its number, the placement, and the layers that change, in their order."""


class Balancer:
    """Decides, on an asyncio loop.

    Args:
        config: the user's.
        book: the load, and the placement in force, which is kept up to date here.
        send: see `SendMove`.
        expert_bytes: of one expert in one layer.
        link_bytes_per_s: of the emulated link; None for a real one.
        nodes: nodes of the ranks.

    Attributes:
        rearrangements: how many were begun, by reason.
        failed: how many were given up, or not planned, by reason.
        layers_moved, bytes_moved: in all.
    """

    def __init__(
        self,
        config: EplbConfig,
        book: LoadBook,
        send: SendMove,
        expert_bytes: int,
        link_bytes_per_s: float | None = None,
        nodes: int = 1,
    ) -> None:
        self._config, self._book, self._send = config, book, send
        self._bytes, self._link, self._nodes = expert_bytes, link_bytes_per_s or _LINK_BYTES_PER_S, nodes
        self.rearrangements: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.layers_moved = self.bytes_moved = 0
        self._first = book.placement
        self._number = 0
        self._wanted: ExpertPlacement | None = None  # by the order under way; None if there is none
        self._lost: ExpertPlacement | None = None  # what engines that were started again have to come back to
        self._planning: asyncio.Task[None] | None = None
        self._steps = 0  # since the last plan
        self._logged_at = self._all_steps = 0
        self._expected: Floats = np.ones(book.placement.num_layers)
        self._step_s, self._seen = _STEP_S, 0.0

    @property
    def moving(self) -> bool:
        """Whether an order is under way."""
        return self._wanted is not None

    def counted(self, rank: int, steps: int) -> None:
        """The book has got a rank's load of so many steps."""
        if rank:  # all ranks step together
            return
        self._steps, self._all_steps = self._steps + steps, self._all_steps + steps
        now, whole = time.monotonic(), steps >= self._book.windows.part_steps
        if self._seen and whole:
            self._step_s = (now - self._seen) / steps
        self._seen = now if whole else 0.0  # ranks tell fewer steps before they pause
        if (
            self._config.log_balancedness
            and self._all_steps - self._logged_at >= self._config.log_balancedness_interval
        ):
            self._log()
        if self.moving or self._planning is not None:
            return
        due = self._steps >= self._config.step_interval
        may_fall = self._config.balancedness_fall and self._steps >= self._config.window_size
        if not (due or may_fall):
            return
        parts = self._book.windows.history(PARTS)
        fallen = self._fallen(parts) if may_fall else parts[:0]
        if len(fallen) >= _NEWEST:
            self._plan(fallen, MoveReason.FALLEN)
        elif due and not len(fallen):  # else a plan would be for loads of before and after the fall
            self._steps = 0
            self._plan(parts, MoveReason.INTERVAL)

    def _fallen(self, parts: Ints) -> Ints:
        """The newest of a window's parts, from which on balancedness has fallen. What was before is of other loads."""
        placement, fall = self._book.placement, self._config.balancedness_fall
        fallen = [has_fallen(part, placement, self._expected, fall=fall) for part in parts]
        return parts[len(parts) - next((count for count, each in enumerate(fallen[::-1]) if not each), len(parts)) :]

    def _plan(self, windows: Ints, reason: MoveReason) -> None:
        placement = self._book.placement
        costs = MoveCosts(
            expert_bytes=self._bytes,
            step_s=max(self._step_s, 1e-6),
            link_bytes_per_s=self._link,
            horizon_steps=self._config.step_interval,
        )

        async def plan() -> None:
            try:
                decision = await asyncio.to_thread(decide, windows, placement, costs, nodes=self._nodes)
            except Exception:  # an error of the planner is no reason to serve no more
                _logger.exception("no placement could be planned: experts stay where they are")
                self.failed[UNPLANNED] += 1
                self._steps = 0
            else:
                if self._book.placement is placement and not self.moving:  # else engines were started again
                    self._decided(decision, reason, final=len(windows) >= PARTS or reason is not MoveReason.FALLEN)
            finally:
                self._planning = None

        self._planning = asyncio.create_task(plan())

    def _decided(self, decision: Decision, reason: MoveReason, *, final: bool) -> None:
        """Move, or stay; after a fall there is another plan with the next part, until the decision is final."""
        move = decision.verdict is Verdict.MOVE
        if not move and not final:
            return
        self._expected, self._steps = decision.after if move else decision.before, 0
        log_event(
            _logger,
            "experts change places" if move else "experts stay",
            why=reason if move else decision.verdict,
            layers=len(decision.layers),
            moved_experts=decision.moved_experts,
            balancedness=round(float(decision.before.mean()), 3),
            expected=round(float(decision.after.mean()), 3),
        )
        if move:
            self.begin(decision.placement, decision.layers, reason)

    def begin(self, placement: ExpertPlacement, layers: Sequence[int], reason: MoveReason) -> None:
        """Send an order; none may be under way."""
        self._number += 1
        self._wanted = placement
        self.rearrangements[reason] += 1
        self._send(self._number, placement, layers)

    def moved(self, number: int, layers: Sequence[int], num_bytes: int, failure: str, *, over: bool) -> None:
        """The ranks have switched layers, or ended an order."""
        if number != self._number or self._wanted is None:
            return  # of an earlier run
        if layers:
            self._book.placement = with_layers(self._book.placement, self._wanted, np.array(layers))
            self.layers_moved += len(layers)
            self.bytes_moved += num_bytes
        if over:
            self._wanted, self._lost, self._steps = None, None, 0
            if failure:
                self.failed[failure] += 1

    def interrupted(self) -> None:
        """Engines have failed; those that are started again have their first placement."""
        if self.moving:
            self.failed[INTERRUPTED] += 1
        self.close()  # there is nobody to obey the plan
        self._wanted = self._planning = None

    def restarted(self) -> None:
        """Engines were started again: bring them back to the placement in force."""
        self._seen = 0.0
        before = self._lost or self._book.placement
        self._book.placement = self._first
        layers = np.flatnonzero((before.experts != self._first.experts).any(axis=1)).tolist()
        self._lost = before if layers else None
        if layers:
            self.begin(before, layers, MoveReason.RESTORED)

    def close(self) -> None:
        """Plan no more."""
        if self._planning is not None:
            self._planning.cancel()

    def _log(self) -> None:
        self._logged_at = self._all_steps
        balance = self._book.balance().balancedness()
        log_event(
            _logger,
            "expert load",
            steps=self._all_steps,
            balancedness=round(float(balance.mean()), 3),
            worst_layer=round(float(balance.min()), 3),
        )
