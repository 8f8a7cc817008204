"""Run a function, or a test, on several gloo ranks, each its own process; the first failure fails the test."""

import importlib
import inspect
import os
import pickle
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forked import AsSpawned

from ubatch import CommGroup

PATIENCE_AFTER_A_FAILURE_S = 10.0
PORTS = range(20_000, 32_000)
"""Below those that a system hands out by itself, so that no connection made meanwhile takes one."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0, dying: Collection[int] = ()
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks; returns their (picklable) results by rank.

    `fn` must be a function of a module. A rank that raises fails the call with its traceback, and so does one that
    ends without a result, unless it is one of `dying` (by `os._exit`), whose result is None.
    """
    context = AsSpawned()
    results = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_rank_main, args=(fn, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    collected: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_s
    running = True
    while running and time.monotonic() < deadline:
        running = any(process.is_alive() for process in ranks)
        while not results.empty():  # drained while they run: a rank with a large result waits for a reader
            rank, result, error = results.get()
            collected[rank] = pickle.loads(result)
            if error:
                errors.append(f"rank {rank}:\n{error}")
                deadline = min(deadline, time.monotonic() + PATIENCE_AFTER_A_FAILURE_S)
        time.sleep(0.02)
    for rank, process in enumerate(ranks):
        if process.is_alive():
            errors.append(f"rank {rank} hung")
            process.kill()
            process.join()
        elif rank not in collected and rank not in dying:
            errors.append(f"rank {rank} ended without a result, exit code {process.exitcode}")
    if errors:
        raise AssertionError("\n".join(errors))
    return [collected.get(rank) for rank in range(world_size)]


def on_ranks(
    world_size: int = 0, *, timeout_s: float = 20.0, dying: Collection[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function `(rank, group, ...)`: it runs on each of so many ranks, with a group over all of them.

    Args:
        world_size: how many; the parameter of this name if the test has one.
        timeout_s: of the group.
        dying: see `run_ranks`; or the parameter of this name.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**parameters: Any) -> None:
            where = body.__module__, body.__name__, timeout_s, parameters
            size = parameters.get("world_size", world_size)
            run_ranks(_run_body, size, *where, dying=parameters.get("dying", dying))

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][2:])  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__module__ = body.__name__, body.__qualname__, body.__module__
        test.__doc__, test.body = body.__doc__, body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, world_size: int, module: str, test: str, timeout_s: float, parameters: Any) -> None:
    body = getattr(importlib.import_module(module), test).body
    body(rank, CommGroup.from_process_group(timeout_s=timeout_s), **parameters)


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        result = pickle.dumps(fn(rank, world_size, *args))  # tensors by value: a queue would share their memory
        results.put((rank, result, ""))
        with suppress(RuntimeError):  # nobody leaves while another still works; who died does not come
            dist.barrier()
    except BaseException:
        results.put((rank, pickle.dumps(None), traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on, nor will before the caller does, but for another caller's one chance in many."""
    dice = random.SystemRandom()  # tests seed the others alike, also those of another run at the same time
    while True:
        port = dice.choice(PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
