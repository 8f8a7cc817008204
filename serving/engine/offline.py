"""Runs requests without a server: on one rank in this process, or on several ranks in processes of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from attention import KVCacheExhausted
from model_runner import RequestError
from serving.balance import ExpertBalance, LoadBook
from serving.engine.client import EngineClient, EngineInfo
from serving.engine.options import EngineOptions
from serving.engine.rank.build import describe_memory, make_core, make_runner, warm_up
from serving.engine.rank.tracing import profile_file, profile_name
from serving.requests import EngineDead, EngineStatistics, RequestInput, RequestOutput
from ubatch import ConfigError, UBatchError

T = TypeVar("T")

_GRAMMAR_S = 1.0
"""How long to wait for a grammar before an interrupt is seen, in seconds."""

OnOutput: TypeAlias = Callable[[RequestOutput], bool]
"""Called with every output; False ends its request."""


class RequestFailed(UBatchError):
    """The request of this id cannot be served, for the error that is its cause."""


class InProcessEngine:
    """Runs one rank in this process.

    Attributes:
        info: what it serves.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._runner = make_runner(options)
        try:
            warm_up(options, self._runner)
            self._core = make_core(options, self._runner)
            memory = f"rank 0: {describe_memory(self._runner)}"
            vocab_size, blocks = self._runner.config.vocab_size, (self._runner.allocator.num_blocks,)
            self.info = EngineInfo(options.scheduler.max_model_len, vocab_size, memory, blocks)
            self._loads = None
            if self._core.loads is not None:
                window = options.eplb_config.window_size
                self._loads = LoadBook(self._core.loads.placement, options.expert_load_out, window)
        except BaseException:
            self._runner.close()
            raise

    def run(self, requests: Sequence[RequestInput], on_output: OnOutput) -> None:
        """Serve all requests; returns when the last has ended. An error aborts the requests that still run.

        Raises:
            RequestError, KVCacheExhausted: a request cannot be served.
            EngineDead: a rank died.
        """
        running: set[str] = set()
        try:
            for request in requests:
                self.add(request)
                running.add(request.request_id)
            while running:
                for output in self.step():
                    if not on_output(output) or output.finish_reason is not None:
                        self.abort(output.request_id)
                        running.discard(output.request_id)
        except RequestFailed as failed:
            raise failed.__cause__ or failed from None
        finally:
            for request_id in running:
                self.abort(request_id)
            self._core.drain()
            self._take_loads()

    def add(self, request: RequestInput) -> None:
        """Add a request, which `step` serves.

        Raises:
            RequestError, KVCacheExhausted: it cannot be served.
        """
        self._core.add(request)

    def step(self) -> Sequence[RequestOutput]:
        """Run one step; returns what it gave to each request. Call it while there are requests.

        Raises:
            RequestFailed: a request cannot be served.
        """
        self._core.wait(_GRAMMAR_S)
        for request_id in self._core.ready():
            try:
                self._core.admit(request_id)
            except (RequestError, KVCacheExhausted) as error:
                raise RequestFailed(request_id) from error
        outputs = self._core.step()
        self._take_loads()
        return outputs

    def _take_loads(self, *, now: bool = False) -> None:
        """Put what has been counted into the book: what is due, or with `now` all."""
        if self._loads is None or self._core.loads is None:
            return
        for news in self._core.loads.news(now=now):
            self._loads.add(0, *news)
        self._loads.tick()

    def balance(self) -> ExpertBalance | None:
        """The experts' load over the last steps, as last reported; None for a dense model."""
        self._take_loads(now=True)
        return None if self._loads is None else self._loads.balance()

    def abort(self, request_id: str) -> None:
        """End a request; does nothing to one that has ended."""
        self._core.abort(request_id)

    def statistics(self) -> Mapping[int, EngineStatistics]:
        """Rank -> its statistics after the last `run`."""
        return {0: self._core.statistics()}

    def start_profile(self) -> None:
        """Start to record the steps."""
        self._core.tracer.start_profile()

    def stop_profile(self, folder: Path) -> list[Path]:
        """Stop recording; returns the trace file of each process. Raises UBatchError if one was not written."""
        path = folder / profile_file(profile_name(), 0)
        wrong = self._core.tracer.stop_profile(path, 0)
        if wrong is not None:
            raise UBatchError(wrong)
        return [path]

    def close(self) -> None:
        """End the engines, and free the model."""
        self._take_loads(now=True)
        if self._loads is not None:
            self._loads.write()
        self._core.close()
        self._runner.close()


class EngineThread:
    """Ranks in processes of their own, with an `EngineClient` in a thread that has an event loop.

    Attributes:
        client: the engines; its coroutines run in the thread, by `call`.
        info: what they serve.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine client", daemon=True)
        self._thread.start()
        try:
            self.client = self.call(EngineClient.start(options))
            self.info = self.client.info
        except BaseException:
            self._stop_loop()
            raise

    def close(self) -> None:
        """End the engines. In the thread itself, where garbage collection may call it, another one does so."""
        if threading.current_thread() is self._thread:
            threading.Thread(target=self.close, name="end of engines").start()
        elif not self._loop.is_closed():
            self.call(self.client.close())
            self._stop_loop()

    def begin(self, request: RequestInput, deliver: Callable[[RequestOutput | Exception], None]) -> Future[None]:
        """Begin a request. `deliver` is called in the thread with every output, or with the error that ends it.
        Cancel what is returned to abort the request.

        Raises:
            EngineDead: the engines were closed.
        """

        async def run() -> None:
            try:
                await self._serve(request, deliver)
            except Exception as error:
                deliver(error)

        if self._loop.is_closed():
            raise EngineDead("the engines were closed.")
        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    async def _serve(self, request: RequestInput, deliver: Callable[[RequestOutput], bool | None]) -> None:
        """Serve a request, until `deliver` returns False for an output."""
        async with aclosing(self.client.generate(request)) as outputs:
            async for output in outputs:
                if deliver(output) is False:
                    return

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop's thread. An interrupt here cancels it, and waits until it has ended."""
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def balance(self) -> ExpertBalance | None:
        """See `InProcessEngine`."""

        async def read() -> ExpertBalance | None:
            return self.client.balance

        return self.call(read())

    def _stop_loop(self) -> None:
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RankEngines(EngineThread):
    """Runs batches of requests on ranks in processes of their own. Methods as of `InProcessEngine`."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._news: SimpleQueue[tuple[str, RequestOutput | Exception]] = SimpleQueue()
        self._added: dict[str, Future[None]] = {}

    def add(self, request: RequestInput) -> None:
        """See `InProcessEngine`; that it cannot be served is raised by `step`."""
        request_id = request.request_id
        self._added[request_id] = self.begin(request, lambda output: self._news.put((request_id, output)))

    def step(self) -> Sequence[RequestOutput]:
        """Wait for what the next steps give; see `InProcessEngine`.

        Raises:
            RequestFailed: a request cannot be served.
        """
        outputs: list[RequestOutput] = []
        while not outputs or not self._news.empty():
            request_id, output = self._news.get()
            if isinstance(output, Exception):
                if outputs:  # they first, and the error in the next step
                    self._news.put((request_id, output))
                    break
                raise RequestFailed(request_id) from output
            outputs.append(output)
        return outputs

    def abort(self, request_id: str) -> None:
        if (running := self._added.pop(request_id, None)) is not None:
            running.cancel()

    def run(self, requests: Sequence[RequestInput], on_output: OnOutput) -> None:
        """See `InProcessEngine`. `on_output` is called in another thread, one call at a time."""
        self.call(self._run(requests, on_output))

    def statistics(self) -> Mapping[int, EngineStatistics]:
        return dict(self.client.statistics)

    def start_profile(self) -> None:
        self.call(self.client.start_profile())

    def stop_profile(self, folder: Path) -> list[Path]:
        return self.call(self.client.stop_profile(folder))

    async def _run(self, requests: Sequence[RequestInput], on_output: OnOutput) -> None:
        tasks = [asyncio.create_task(self._serve(request, on_output)) for request in requests]
        try:
            await asyncio.gather(*tasks)
            await self.client.settle()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


OfflineEngine: TypeAlias = InProcessEngine | RankEngines
"""Runs batches of requests."""


def make_offline_engine(options: EngineOptions) -> OfflineEngine:
    """Make the engine: one rank runs in this process, on all cores; several run in processes of their own.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded with these options.
        EngineDead: a rank did not start.
    """
    if options.world_size > 1:
        return RankEngines(options)
    if options.restarts.max_engine_restarts:
        raise ConfigError(
            f"max_engine_restarts is {options.restarts.max_engine_restarts}, but a single rank runs in this process, "
            "which cannot start itself again. Use 0, several ranks, or AsyncLLM, whose ranks are always processes of "
            "their own."
        )
    return InProcessEngine(options)
