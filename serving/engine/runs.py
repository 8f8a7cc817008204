"""Runs of the engines, one after another: engines that have failed are started again, as often as they may be.

    start      the first run; what goes wrong in it is not tried again
    failed     who is to blame is found out, the run is ended, and the next one begins, if `RestartBudget` allows it
    given up   it does not, or a node is lost, or engines cannot be started for any other reason

What ranks have prepared outlives their processes (`kept`).
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from serving.engine.kept import KeptOfRank
from serving.engine.launch import EngineMain
from serving.engine.liveness import dead_error, start_error
from serving.engine.options import EngineOptions
from serving.engine.restarts import Pause, RestartBudget, RestartReason
from serving.engine.run import EngineRun, RunFailed
from serving.engine.suspects import Blame, blame
from serving.engine.wire import messages as wire
from serving.logs import log_event
from serving.network import numeric_address
from serving.requests import EngineDead
from ubatch import UBatchError

_logger = logging.getLogger(__name__)

_DEAD_S = 3.0
"""How long engines may take to end after a failure that ends the last run, in seconds."""


class Owner(Protocol):
    """What is told of the runs (`EngineClient`)."""

    def heard(self, message: wire.FromEngine) -> None:
        """A message has come that is no sign of life."""

    def interrupted(self) -> None:
        """The run has failed; no engine has any request now."""

    def blamed(self, blame: Blame, error: EngineDead) -> bool:
        """Why it has failed is known. Returns whether requests are searched for one that kills engines."""

    def serving(self) -> None:
        """All engines of a run are ready."""

    def given_up(self, error: EngineDead) -> None:
        """There will be no other run."""


class EngineRuns:
    """The runs of one client, on one asyncio loop.

    Attributes:
        run: the present one.
        serves: whether its engines take requests.
        pause: why there is none that does, or, set by the owner, why not all requests may run; None otherwise.
        dead: why the last one has failed; None before.
    """

    def __init__(self, options: EngineOptions, main: EngineMain, owner: Owner) -> None:
        self._options, self._main, self._owner = options, main, owner
        self._budget = RestartBudget(options.restarts)
        self._kept: Mapping[int, KeptOfRank] = {}
        if options.restarts.max_engine_restarts > 0:
            self._kept = {rank: KeptOfRank() for rank in options.local_ranks}
        self.run = EngineRun(options, owner.heard, self._failed)
        self.serves = False
        self.pause: Pause | None = None
        self.dead: EngineDead | None = None
        self._address = ""
        self._work: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Begin the first run. Call `close` after an error, too.

        Raises:
            ConfigError, CheckpointError: a rank cannot start with these options.
            EngineDead: a rank did not start for another reason, or a node did not join.
        """
        try:
            await self.run.start(self._main, self._kept)
        except RunFailed as error:
            failed = error.failed
            raise start_error(failed, self._options.describe_rank(failed.rank)) from None
        if self._options.nnodes > 1:
            self._address = numeric_address(self._options.master_addr)
        self._serve(self.run)
        if self._work is not None:  # a rank has failed meanwhile
            await self._work
        if self.dead is not None:
            raise self.dead

    async def close(self, timeout_s: float) -> None:
        """End the engines; no other run begins.

        Args:
            timeout_s: how long they may take before they are killed, in seconds.
        """
        self._closing = True
        self.serves = False
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        try:
            await self.run.end(timeout_s)
        except UBatchError as error:
            log_event(_logger, "engines do not end", level=logging.ERROR, error=error)
        for kept in self._kept.values():
            kept.close()

    @property
    def restarts(self) -> Mapping[str, int]:
        """Reason (`RestartReason`) -> how often engines were started again."""
        return self._budget.counts

    def _serve(self, run: EngineRun) -> None:
        if not run.over:  # else it has failed meanwhile, and the next one begins
            self.serves = True
            self._owner.serving()

    def _failed(self, failed: wire.Failed) -> None:
        """The cause of a failure is known: start the engines again, or give up."""
        if self._closing:
            return
        self.serves = False
        error = dead_error(failed, self._options.describe_rank(failed.rank))
        if self._options.restarts.max_engine_restarts:
            self.pause = Pause(str(error), time.monotonic(), self._budget.expected_s)
            self._work = asyncio.create_task(self._recover(failed, error))
        else:
            self._give_up(failed.rank, error)

    async def _recover(self, failed: wire.Failed, error: EngineDead) -> None:
        try:
            self._owner.interrupted()
            searching = self._owner.blamed(await self._blame(failed), error)
            if not self._budget.may_restart(failed.reason, searching=searching):
                self._give_up(failed.rank, error)
                return
            log_event(_logger, "engine failed", level=logging.ERROR, rank=failed.rank, error=error, then="start again")
            await self._start_again(error)
        except Exception as failure:  # this machine cannot start processes any more, for example
            _logger.exception("engines cannot be started again")
            self._give_up(failed.rank, EngineDead(f"engines cannot be started again: {failure}"))

    async def _blame(self, failed: wire.Failed) -> Blame:
        found = blame(self._options, failed, self.run.found())
        silent = failed.reason is RestartReason.HUNG  # its node knows whether it is stopped
        if self._options.nnodes > 1 and (found.inside or silent):  # other nodes have requests in the step, too
            found = blame(self._options, failed, await self.run.ask_found(failed.text))
        return found

    async def _start_again(self, error: EngineDead) -> None:
        """Begin runs until one is ready, or they have failed too often."""
        begun, first = time.monotonic(), error
        await self.run.end(0.0, str(first), again=True)
        options = self._options
        if options.nnodes > 1:  # what names the address may be gone with the link
            options = replace(options, master_addr=self._address)
        while True:
            self.run = run = EngineRun(options, self._owner.heard, self._failed, rejoins_s=options.dbo.timeout_s)
            try:
                await run.start(self._main, self._kept)
                break
            except RunFailed as again:
                failed = again.failed
                error = dead_error(failed, options.describe_rank(failed.rank), "did not start")
                if failed.reason is RestartReason.UNREACHABLE:  # it has had its time to come back
                    error, more = EngineDead(f"{first} Engines were started again, but {error}"), False
                else:
                    more = self._budget.may_restart(failed.reason)
                await run.end(0.0, str(error), again=more)
                if not more:
                    self._give_up(failed.rank, error)
                    return
                log_event(_logger, "engine did not start again", level=logging.ERROR, rank=failed.rank, error=error)
        self._budget.expected_s = time.monotonic() - begun
        log_event(_logger, "engines serve again", seconds=self._budget.expected_s)
        for rank, pid in run.pids.items():
            log_event(_logger, "engine", rank=rank, pid=pid)
        self._serve(run)

    def _give_up(self, rank: int, error: EngineDead) -> None:
        """There is no other run: end the other engines."""
        self.dead, self.pause = error, None
        log_event(_logger, "engine dead", level=logging.ERROR, rank=rank, error=error)
        self._owner.given_up(error)
        self._work = asyncio.create_task(self._end_last(str(error)))

    async def _end_last(self, failure: str) -> None:
        with suppress(UBatchError):  # said by `close`
            await self.run.end(_DEAD_S, failure)
