"""Processes forked from a server that has imported what tests need: they start in a tenth of a second, not in five.

Tests start ranks of their own with it, and the ranks and engines that commands spawn where users run them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, reduction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.fork_server import ForkedProcess, ForkServer

_getppid = os.getppid
PRELOAD = ["torch", "torch.distributed.distributed_c10d", "ubatch"]
"""What the server imports where it is not forked itself."""


def fork_server() -> None:
    """Fork both servers from this process, which has imported all tests and run none yet: the one of `multiprocessing`,
    and the one that the engines' ranks are forked from.

    They would be spawned, import it all once more, and processes of the first would import the tests' modules.
    """
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()  # the server ends when nobody holds the other end any more

    def serve() -> None:
        os.close(held)
        forkserver.main(listener.detach(), alive, preload=[])

    server = _forked(serve)
    listener.close()
    os.close(alive)
    ours = forkserver._forkserver  # type: ignore[attr-defined]
    ours._forkserver_address, ours._forkserver_alive_fd, ours._forkserver_pid = address, held, server.pid
    from serving import fork_server

    fork_server.use(forked_server())


def forked_server() -> ForkServer:
    """A server of ranks, forked from this process."""
    from serving import fork_loop, fork_server

    mine, theirs = socket.socketpair()

    def serve() -> None:
        os.getppid = _getppid
        mine.close()
        handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        fork_loop.serve_imported(theirs.detach(), handlers)

    child = _forked(serve)
    theirs.close()
    return fork_server.ForkServer(mine, child, None)


@contextlib.contextmanager
def own_server() -> Iterator[ForkServer]:
    """A server for one test, in place of that of all tests; and another one if a start begins one."""
    from serving import fork_server

    before, start, begun = fork_server._current, fork_server.ForkServer.start, [forked_server()]

    def begin() -> ForkServer:
        begun.append(forked_server())
        return begun[-1]

    fork_server.ForkServer.start = staticmethod(begin)  # type: ignore[method-assign,assignment]
    fork_server.use(begun[0])
    try:
        yield begun[0]
    finally:
        fork_server.ForkServer.start = start  # type: ignore[method-assign]
        fork_server.use(before)
        for each in begun:
            each.close()
        multiprocessing.active_children()  # forgets those that have ended with a server


def start(target: Callable[..., object], *args: Any) -> ForkedProcess:
    """A process that the present server forks."""
    from serving.fork_server import ForkedProcess

    process = ForkedProcess(target=target, args=args, name="rank 0")
    process.start()
    return process


def say(text: str) -> None:
    print(text, flush=True)


def exit_7() -> None:
    sys.exit(7)


def wait_long() -> None:
    time.sleep(600)


@dataclass
class _Child:
    """A child of a fork, to `ForkServer`."""

    pid: int
    parent: int = field(default_factory=os.getpid)

    def kill(self) -> None:
        if os.getpid() != self.parent:  # a later child of the same parent, which forgets it
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        with contextlib.suppress(ChildProcessError):  # in a child that has inherited it
            os.waitpid(self.pid, 0)
        return 0


def _forked(body: Callable[[], object]) -> _Child:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # the one other thread, of pytest-xdist, waits for its next order
    if child == 0:
        try:
            _forget_the_test_run()
            body()
        finally:
            os._exit(0)
    return _Child(child)


def forget_the_server() -> None:
    """In a child of a fork, whose processes start another one: only its parent may wait for this one.

    Its ranks, if it starts some, are forked from a fork of the child.
    """
    ours = forkserver._forkserver  # type: ignore[attr-defined]
    ours._forkserver_address = ours._forkserver_alive_fd = ours._forkserver_pid = None
    _fork_own_ranks()


def _fork_own_ranks() -> None:
    from serving.fork_server import ForkServer

    ForkServer.start = staticmethod(forked_server)  # type: ignore[method-assign,assignment]


def _forget_the_test_run() -> None:
    """Handlers, filters of warnings and files are those of a new process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    logging.getLogger().handlers.clear()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, closefd=False) for place, mode in enumerate("rww"))


class AsSpawned:
    """In place of `multiprocessing` in a module that spawns: forks, and the child sees what a spawned one sees."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self.Pipe, self.SimpleQueue = self._context.Pipe, self._context.SimpleQueue

    @property
    def of_pools(self) -> Any:
        """What `concurrent.futures` needs to fork its workers; they see no changes of this process's environment."""
        return self._context

    def get_context(self, method: str) -> AsSpawned:
        assert method == "spawn"
        return self

    def Process(self, *, target: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:  # noqa: N802
        arguments = (target, args, dict(os.environ), _Outputs())
        return self._context.Process(target=_run, args=arguments, **options)


class _Outputs:
    """Standard output and error of the process that starts another; that one gets them as two file descriptors."""

    def __reduce__(self) -> Any:
        return _file_descriptors, (reduction.DupFd(1), reduction.DupFd(2))


def _file_descriptors(out: Any, err: Any) -> tuple[int, int]:
    return out.detach(), err.detach()


def _run(target: Callable[..., Any], args: tuple[Any, ...], environ: Mapping[str, str], outputs: Any) -> None:
    gc.freeze()  # what was imported before the fork is no garbage
    for place, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    _fork_own_ranks()
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.getppid = lambda: parent.pid if parent.is_alive() else 1  # type: ignore[assignment,return-value]  # not the server
    target(*args)
