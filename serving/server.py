"""The API process of a server, from start to end.

start     take the port, load the tokenizer, start the engines
serve     until a signal arrives or the engines have failed for good; meanwhile the client starts them again
drain     new requests get 503 while running requests finish
end       stop the engines, whatever happened before

A second signal ends the server at once, in any phase.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar

import uvicorn
from fastapi import FastAPI
from prometheus_client import make_asgi_app

from serving.api import Service, create_app
from serving.api.http.connections import (
    CannotListen,
    Listener,
    connection_protocol,
    listening,
    most_connections,
    raise_file_limit,
)
from serving.api.request_log import HttpMetrics, RequestLog
from serving.engine.client import EngineClient
from serving.engine.launch import EngineMain
from serving.engine.rank.process import run_engine
from serving.engine.wire.stores import RunFolder
from serving.engine_metrics import show_balance, show_cache, show_moves, show_restarts
from serving.fork_server import kill_server
from serving.generation_config import request_defaults
from serving.logs import log_event
from serving.metrics import make_registry
from serving.options import Command, Settings, chosen_dtype
from serving.requests import EngineDead
from serving.text.chat_template import DEFAULT, ChatTemplate, read_template
from serving.text.tokenizer import check_chat_template, load_tokenizer
from serving.turns.parsers import TurnSettings, with_defaults
from ubatch import ForwardMode
from ubatch.schedules import mode_key

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LIMITS = ("max_waiting_requests", "max_outputs_per_request", "max_log_len", "max_logprobs")
_LAST_RESPONSES_S = 5
"""After draining, seconds that clients have to read the rest of their responses."""
_LAST_ERRORS_S = 2
"""The same after engines have failed for good."""
_SICK_S = 2.0
"""After that, seconds for which `/health` and `/live` report why before the server ends."""


def run_server(command: Command, *, engine_main: EngineMain = run_engine) -> int:
    """Serve until told to end; the exit status is 0 after a drain.

    Args:
        engine_main: main function of the ranks' processes.

    Raises:
        ConfigError, CheckpointError: the model cannot be served like this.
        CannotListen: the port is in use, or this user may not use it.
        EngineDead: an engine died; the message names its rank.
    """
    files = raise_file_limit()
    with listening(command.settings["host"], command.settings["port"]) as listener:
        try:
            return asyncio.run(_Serve(command, listener, files, engine_main).run())
        finally:
            for number in _SIGNALS:  # everything has ended: a signal needs no handling now
                signal.signal(number, signal.SIG_DFL)


class _Stop:
    """Handles SIGINT and SIGTERM while the loop runs: the first signal starts draining, the second ends the server.

    Args:
        at_once: called with the number of the second signal.

    Attributes:
        came: set by the first signal.
        number: the number of the first signal.
    """

    def __init__(self, at_once: Callable[[int], None]) -> None:
        self.came = asyncio.Event()
        self.number = 0
        self._at_once = at_once
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: int) -> None:
        if self.came.is_set():
            self._at_once(number)
        self.number = number
        self.came.set()


def _end_at_once(number: int) -> NoReturn:
    """End this process and its engines, without waiting for anything."""
    log_event(_logger, "ended at once", level=logging.WARNING, signal=signal.Signals(number).name)
    for engine in multiprocessing.active_children():
        engine.kill()
    kill_server()
    RunFolder.remove_all()
    sys.stderr.flush()
    os._exit(128 + number)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: we drain first, and own the engines."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class _Serve:
    """One server's life.

    Args:
        command: what to serve, and how.
        listener: the socket to listen on, already bound.
        files: limit of open files.
        engine_main: main function of the ranks' processes.
    """

    def __init__(
        self, command: Command, listener: socket.socket, files: int, engine_main: EngineMain = run_engine
    ) -> None:
        self.settings: Settings = command.settings
        self.options = command.engine
        self.engine_main = engine_main
        names = self.settings["served_model_name"]
        self.names: tuple[str, ...] = (names,) if isinstance(names, str) else names
        self.listener = listener
        self.most_connections = self.settings["max_connections"] or most_connections(files)
        self._around = partial(
            RequestLog, access_log=self.settings["access_log"], headers=self.settings["enable_request_id_headers"]
        )

    async def run(self) -> int:
        stop = _Stop(_end_at_once)
        asyncio.get_running_loop().set_exception_handler(Listener.spare_traceback)
        settings, own_template = self.settings, self.settings["chat_template"]
        tokenizer = load_tokenizer(self.options.model, None if own_template is None else read_template(own_template))
        source = self.options.model if own_template is None else "--chat-template"
        template = check_chat_template(tokenizer, source)
        log_event(
            _logger,
            "starting",
            model=self.settings["model"],
            folder=self.options.model if str(self.options.model) != self.settings["model"] else None,
            ranks=self.options.data_parallel_size,
            tensor_parallel_size=self.options.tensor_parallel_size if self.options.tensor_parallel_size > 1 else None,
            device=self.options.device,
            dtype=self.options.dtype,
        )
        for choice in chosen_dtype(self.settings):
            log_event(_logger, choice)
        if template is not None and template.name not in (None, DEFAULT):
            reason = f"the checkpoint names several, and none {DEFAULT}"
            log_event(_logger, f"chat template {template.name}", reason=reason)
        turns = self._turns(None if template is None else ChatTemplate.of(tokenizer, tools=True))
        client = await _unless(stop.came, EngineClient.start(self.options, engine_main=self.engine_main))
        if client is None:
            log_event(_logger, "interrupted while starting", signal=signal.Signals(stop.number).name)
            return 128 + stop.number
        try:
            changed = settings["generation_config"], settings["override_generation_config"]
            defaults = request_defaults(self.options.model, *changed)
            if defaults:
                log_event(_logger, "defaults of requests", **defaults)
            registry, observer = make_registry(self.names[0], lambda: client.statistics)
            cache = {name: setting.value for name, setting in self.settings.all.items()}
            show_cache(registry, cache, lambda: client.info.num_kv_blocks)
            show_restarts(registry, self.names[0], client)
            show_balance(registry, self.names[0], lambda: client.balance)
            if client.balancer is not None:
                show_moves(registry, self.names[0], client.balancer)
            self._around = partial(self._around, count=HttpMetrics(registry).count)
            service = Service(
                client,
                tokenizer,
                self.names,
                defaults,
                observer,
                root=str(self.settings["model"]),
                profiles=self.settings["profile_dir"] is not None,
                log_requests=self.settings["enable_log_requests"],
                turns=turns,
                tokens_as_ids=settings["return_tokens_as_token_ids"],
                force_usage=settings["enable_force_include_usage"],
                template_kwargs=settings["default_chat_template_kwargs"] or {},
                **{name: settings[name] for name in (*_LIMITS, "response_role", "seed")},
            )
            gc.collect()
            gc.freeze()  # to walk through all modules again would hold the event loop for tenths of a second
            app = create_app(
                service,
                api_key=self.settings["api_key"],
                max_request_bytes=self.settings["max_request_bytes"],
                metrics_app=make_asgi_app(registry),
                around=self._around,
                root_path=settings["root_path"] or "",
                describes=not settings["disable_fastapi_docs"],
                cross_origin=_cross_origin(settings),
            )
            return await self._serve(client, app, stop)
        finally:
            await client.close()

    def _turns(self, template: ChatTemplate | None) -> TurnSettings:
        """How tool calls and reasoning are read."""
        given = TurnSettings(**{each.name: self.settings[each.name] for each in fields(TurnSettings)})
        turns = with_defaults(given, None if template is None else template.source)
        if turns != given:
            derived = {each.name: getattr(turns, each.name) for each in fields(TurnSettings)}
            log_event(_logger, "parsers that the chat template shows", **{k: v for k, v in derived.items() if v})
        return turns

    async def _serve(self, client: EngineClient, app: FastAPI, stop: _Stop) -> int:
        server = _Server(
            uvicorn.Config(
                app,
                http=connection_protocol(self.most_connections, self._around),
                log_config=None,
                access_log=False,  # the application's own log has the request's id
                timeout_graceful_shutdown=_LAST_RESPONSES_S,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        died = asyncio.create_task(client.wait_dead())
        stopped = asyncio.create_task(stop.came.wait())
        try:
            await self._say_ready(client, server, serving)
            await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not died.done():
                await self._drain(client, app.state.service, stop, died)
            elif died.done():
                await _unless(stop.came, asyncio.sleep(_SICK_S))
            if died.done():
                server.config.timeout_graceful_shutdown = _LAST_ERRORS_S
            server.should_exit = True
            await serving
        finally:
            for task in (serving, died, stopped):
                task.cancel()
            await asyncio.gather(serving, died, stopped, return_exceptions=True)
        if client.dead is not None:
            raise EngineDead(str(client.dead).splitlines()[0])  # the rest has been logged
        return 0

    async def _say_ready(self, client: EngineClient, server: _Server, serving: asyncio.Task[None]) -> None:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            error = serving.exception()
            if isinstance(error, OSError):  # another process was bound to the port too, and listened first
                raise CannotListen(f"cannot listen on {self.settings['host']}: {error.strerror}.") from error
            return
        for rank, pid in client.pids.items():
            shared = self.options.tensor_parallel_size > 1
            place = {"dp": self.options.dp_rank(rank), "tp": self.options.tp_rank(rank)} if shared else {}
            log_event(_logger, "engine", rank=rank, pid=pid, **place)
        for line in client.info.memory.splitlines():
            log_event(_logger, f"memory of {line}")
        transport = self.settings.all["all2all_backend"]
        if transport.value is not None:
            log_event(_logger, f"all2all back end {transport.value}", reason=transport.detail or "asked for")
        self._log_overlap()
        log_event(_logger, f"ready on {_url(self.listener)}", model=", ".join(self.names))

    def _log_overlap(self) -> None:
        dbo = self.options.dbo
        if not dbo.enable_dbo:
            log_event(_logger, "no overlap", reason="--enable-dbo is not given")
            return
        log_event(
            _logger,
            "overlap",
            ubatch_size=dbo.num_ubatches,
            decode_from_tokens=dbo.dbo_decode_token_threshold,
            prefill_from_tokens=dbo.dbo_prefill_token_threshold,
            schedule=dbo.resolved_schedule().name,
        )
        for mode in (ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY):
            if mode_key(mode) in dbo.modes:
                own = dbo.for_mode(mode)
                log_event(
                    _logger,
                    f"overlap of {mode_key(mode)} steps",
                    from_tokens=own.token_threshold,
                    schedule=own.schedule.name,
                    lanes=own.schedule.lanes,
                    chunks=own.schedule.chunks,
                )

    async def _drain(self, client: EngineClient, service: Service, stop: _Stop, died: asyncio.Task[EngineDead]) -> None:
        """Wait until the running requests have ended, the time-out has passed, or an engine has died."""
        service.draining = True
        patience = self.settings["drain_timeout_s"]
        log_event(_logger, "draining", signal=signal.Signals(stop.number).name, requests=client.num_outstanding)
        deadline = asyncio.get_running_loop().time() + patience
        while client.num_outstanding and not died.done():
            if asyncio.get_running_loop().time() > deadline:
                log_event(
                    _logger, "cut off", level=logging.WARNING, requests=client.num_outstanding, drain_timeout_s=patience
                )
                return
            await asyncio.sleep(0.05)
        if not client.num_outstanding and not died.done():
            log_event(_logger, "drained")


def _cross_origin(settings: Settings) -> dict[str, Any] | None:
    """Which pages in browsers may call the server; None for none."""
    if settings["allowed_origins"] is None:
        return None
    return {
        "allow_origins": settings["allowed_origins"],
        "allow_methods": settings["allowed_methods"] or ("*",),
        "allow_headers": settings["allowed_headers"] or ("*",),
        "allow_credentials": settings["allow_credentials"],
    }


async def _unless(event: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """The result of `work`; None if the event is set first, and then `work` is cancelled and awaited."""
    task, called_off = asyncio.ensure_future(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, called_off}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, called_off):
            each.cancel()
        await asyncio.gather(task, called_off, return_exceptions=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
