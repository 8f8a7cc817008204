"""Runs work that would block the event loop, such as tokenizing a long text, in threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from serving.api.schema.errors import shutting_down
from serving.requests import QueueFull

SHORT_BYTES = 20_000  # a larger body takes milliseconds, so its work runs in a thread
WAITING_BYTES = 64 * 2**20  # most bytes of bodies in the queue
THREADS = 2
DRAINING_SEEN_S = 0.05

Result = TypeVar("Result")


@dataclass(eq=False)
class _Job:
    pieces: deque[Callable[[], Any]]
    size: int
    results: list[Any] = field(default_factory=list)
    done: Future[list[Any]] = field(default_factory=Future)

    @property
    def left(self) -> int:
        """Bytes still to be processed, estimated."""
        return self.size * len(self.pieces) // max(1, len(self.pieces) + len(self.results))


class LongWork:
    """Runs the work of large bodies in two threads, first come, first served; the work of small bodies runs at once.

    Work in several pieces goes back to the end of the queue after each piece.

    Work that has not begun is dropped when its client leaves or the server drains. Work that has begun cannot be
    stopped; then neither the request nor the end of the process waits for it.
    """

    def __init__(self, draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._threads = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Run `work`; returns its result, or raises its error.

        Args:
            work: called once, or never if it is dropped.
            size: bytes of the request's body.

        Raises:
            QueueFull: more than `WAITING_BYTES` would wait.
            ApiError: 503, the server is about to end.
        """
        (result,) = await self.run_pieces((work,), size)
        return result

    async def run_pieces(self, pieces: Sequence[Callable[[], Result]], size: int) -> list[Result]:
        """As `run`, for several pieces of one body's work; returns the result of each."""
        if size < SHORT_BYTES:
            return [piece() for piece in pieces]
        job = _Job(deque(pieces), size)
        self._enqueue(job)
        try:
            done = asyncio.wrap_future(job.done)
            while not done.done():
                if self._draining():
                    raise shutting_down()
                await asyncio.wait((done,), timeout=DRAINING_SEEN_S)
            return done.result()
        finally:
            self._drop(job)

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            waiting = sum(each.left for each in self._waiting)
            if waiting and waiting + job.size > WAITING_BYTES:
                raise QueueFull(f"{waiting} bytes of long prompts wait to be tokenized already. Try again later.")
            self._waiting.append(job)
            if self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="long work", daemon=True).start()

    def _drop(self, job: _Job) -> None:
        job.done.cancel()
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.done.cancelled():
                continue
            try:
                job.results.append(job.pieces.popleft()())
            except BaseException as error:  # raised where the result is awaited
                self._end(job, error)
                continue
            if job.pieces:
                with self._lock:
                    self._waiting.append(job)
            else:
                self._end(job, None)

    @staticmethod
    def _end(job: _Job, error: BaseException | None) -> None:
        if not job.done.set_running_or_notify_cancel():
            return  # its request was dropped
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(job.results)

    def _next(self) -> _Job | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None
