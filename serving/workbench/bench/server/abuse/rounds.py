"""Checks after a load: requests leave nothing behind, memory does not grow, and a hung rank is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from serving.workbench.bench.server.abuse.watch import ask_references, resident_bytes
from serving.workbench.bench.server.load import Load, make_tasks, read_metrics
from serving.workbench.bench.server.process import ServerProcess
from serving.workbench.bench.server.requests import GREEDY, RequestFailed, Server, Status, send_all

_REST_S = 60.0
_AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def rest(server: Server) -> str | None:
    """Wait until the engines hold no requests and no KV; returns what they still hold after a minute, or None.

    Raises:
        RequestFailed: `/metrics` lacks these numbers.
    """
    deadline = time.monotonic() + _REST_S
    while True:
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in await read_metrics(server):
            totals[sample.name] += sample.value
        if missing := [name for name in _AT_REST if name not in totals]:
            raise RequestFailed(f"/metrics of {server.base_url} has no {', '.join(missing)}: nothing can be checked.")
        held = {name: totals[name] for name in _AT_REST if totals[name]}
        if not held:
            return None
        if time.monotonic() > deadline:
            return ", ".join(f"{name} {value:g}" for name, value in held.items())
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Round:
    """Result of one load of streams, a third of which is dropped.

    Attributes:
        wrong: complete answers that differ from those of the server without load.
        held: what the engines still hold afterwards; None for nothing.
        resident: memory in bytes of the API process and of each engine, afterwards.
    """

    ok: int
    cancelled: int
    failed: int
    wrong: int
    held: str | None
    resident: tuple[int, ...]
    first_error: str | None


async def rounds(server: Server, process: ServerProcess, count: int, streams: int) -> list[Round]:
    """Run the same streams `count` times; a third of them is dropped midway."""
    load = Load(num_prompts=streams, input_len=16, output_len=24, range_ratio=0.5, cancel_ratio=1 / 3)
    tasks = await make_tasks(server, load, **GREEDY)
    references = await ask_references(server, [(list(map(int, task.prompt)), task.max_tokens) for task in tasks])
    done: list[Round] = []
    for _ in range(count):
        outcomes = await send_all(server, tasks)
        held = await rest(server)
        resident = tuple(resident_bytes(pid) for pid in (process.process.pid, *engines_of(process)))
        ok, failed, cancelled = ([each for each in outcomes if each.status is status] for status in Status)
        wrong = sum(not references[each.index].allows(each) for each in ok)
        first_error = failed[0].error if failed else None
        done.append(Round(len(ok), len(cancelled), len(failed), wrong, held, resident, first_error))
    return done


def engines_of(process: ServerProcess) -> list[int]:
    """Process ids of the engines in the order of their ranks: the children of what the API process forks them from."""
    try:
        forked = [child for child in _children(process.process.pid) if b"resource_tracker" not in _command_line(child)]
        return sorted(engine for child in forked for engine in _children(child))
    except OSError as error:
        raise RequestFailed(f"process {process.process.pid} of the server is gone.") from error


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"resource_tracker"  # the process is gone


@dataclass(frozen=True)
class Hang:
    """What a server did after a rank was stopped.

    Attributes:
        unhealthy_s: seconds until `/health` answered 503; None if it never did.
        errors: errors of the running streams.
        ended_s: seconds until the server ended; None if it did not.
    """

    rank: int
    unhealthy_s: float | None
    errors: tuple[str, ...]
    ended_s: float | None
    exit_status: int | None


async def hang(server: Server, process: ServerProcess, timeout_s: float) -> Hang:
    """Stop the last rank while streams run, and observe the server, up to twice the `timeout_s` after which it must
    notice. The server has ended afterwards."""
    engines = engines_of(process)
    rank = len(engines) - 1
    tasks = await make_tasks(server, Load(num_prompts=8, input_len=8, output_len=512), ignore_eos=True)
    streams = asyncio.create_task(send_all(server, tasks))
    await asyncio.sleep(1.0)
    begun, unhealthy_s, ended_s = time.monotonic(), None, None
    os.kill(engines[rank], signal.SIGSTOP)
    try:
        async with server.client() as client:
            while ended_s is None and time.monotonic() < begun + 2 * timeout_s + 10:
                with suppress(httpx.HTTPError):  # it may have ended
                    status = (await client.get("/health", timeout=5.0)).status_code
                    if unhealthy_s is None and status == httpx.codes.SERVICE_UNAVAILABLE:
                        unhealthy_s = time.monotonic() - begun
                ended_s = time.monotonic() - begun if process.process.poll() is not None else None
                await asyncio.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):  # the server has ended it already
            os.kill(engines[rank], signal.SIGKILL)
    errors = tuple(outcome.error or "none" for outcome in await streams)
    return Hang(rank, unhealthy_s, errors, ended_s, process.process.poll())
