"""A process that has imported what ranks need, and forks them: a rank starts in milliseconds, not in seconds.

    caller     begin            starts the server (`fork_loop`), which imports what ranks need meanwhile
               process.start()  sends a request: descriptors, among them a pipe for what the process is to run
    server     forks; sends the process's id, and its exit status when it has ended
    process    runs its function as one that `multiprocessing` spawns: with the caller's environment, folder, arguments,
               main module, limit of open files, file mode mask, cores, standard output and error

The server does nothing else. It ignores SIGINT and SIGTERM, which often reach every process of a group while the caller
still drains.

Some libraries read the environment when they are loaded (OpenMP's, for example), and that is in the server. So a server
forks only for the environment that it was started in. A caller whose variables have changed gets another one, and waits
for its imports.

A server ends with its caller, and its processes with it, whoever is killed: the system kills a process whose server has
ended (PR_SET_PDEATHSIG). After that the next start begins a new one. So does a start that a server does not answer: it
was stopped, or its disk hangs. That server ends with the last of its processes. One that has never answered fails the
start, which names it. (A server that is stopped when its caller is killed ends once it is continued.)
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from serving import fork_loop
from serving.fork_loop import Inherited, close_all
from serving.processes import is_readable, is_writable, process_state
from ubatch.errors import UBatchError

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Set for the server alone: numpy would start threads when it is imported."""
_IMPORTS_S, _ANSWERS_S = 300.0, 30.0
"""How long a server may take to answer: the first time, when it imports from a cold disk, and later, in seconds."""
_LOOK_S = 0.1
"""How often whoever waits for the answer looks whether the start is abandoned, in seconds."""
_ENDS_S = 5.0
"""How long a server that was killed may take to end, in seconds."""


class CannotFork(UBatchError):
    """The server of forks ends at once, and has written to standard error why; or it does not answer; or the start was
    abandoned."""


class _NoAnswer(CannotFork):
    """A server does not answer any more."""


class _Child(Protocol):
    """The server's process, to whoever has started it."""

    pid: int

    def kill(self) -> None:
        """Kill it."""

    def wait(self, timeout: float) -> int:
        """Wait for its end, for up to `timeout` seconds.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """


class ForkServer:
    """A server, as its caller sees it.

    Args:
        connection: the caller's end of the socket between them.
        process: the server's.
        environ: the variables that it was started with; None if it forks for any.

    Attributes:
        answered: whether it has answered a request: it has imported what it needs.
    """

    def __init__(self, connection: socket.socket, process: _Child, environ: Mapping[str, str] | None) -> None:
        self._connection, self._process, self._environ = connection, process, environ
        self.answered = False
        self._end = weakref.finalize(self, _end, connection, process)

    @classmethod
    def start(cls) -> ForkServer:
        """Start one for this process's environment. Returns at once, while it imports."""
        environ = dict(os.environ)
        ours, theirs = socket.socketpair()
        with theirs:
            imported = f"import sys; sys.path[:] = {sys.path!r}; from {fork_loop.__name__} import serve"
            run = f"{imported}; serve({theirs.fileno()})"
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
            words = [sys.executable, *flags, "-c", run]
            process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environ | _ONE_THREAD)
        return cls(ours, process, environ)

    def fork(self, descriptors: Sequence[int]) -> None:
        """Ask for a process; `descriptors` are those of `fork_loop._run_forked`.

        Raises:
            OSError: the server is gone.
        """
        socket.send_fds(self._connection, [b"!"], list(descriptors))

    def usable(self) -> bool:
        """Whether it runs, and forks for this process's environment."""
        same = self._environ is None or self._environ == dict(os.environ)
        if not same or not self._end.alive:
            return False
        return not is_readable(self._connection.fileno())  # the server never writes there: it can only end

    def kill(self) -> None:
        """Kill the server, and its processes with it."""
        self._process.kill()

    def close(self) -> None:
        """The same, and wait for its end."""
        self._end()

    def __str__(self) -> str:
        pid = self._process.pid
        return f"the process that starts ranks ({pid}, in state {process_state(pid)})"


def _end(connection: socket.socket, process: _Child) -> None:
    connection.close()
    process.kill()  # it may still import
    with suppress(subprocess.TimeoutExpired):  # it waits for a disk
        process.wait(_ENDS_S)


_current: ForkServer | None = None
_changing = threading.Lock()


def begin() -> ForkServer:
    """The server for this process and its environment; started if there is none. Call it early: importing takes long.

    A server that is replaced ends with the last of its processes.
    """
    global _current
    with _changing:
        if _current is None or not _current.usable():
            _current = ForkServer.start()
        return _current


def use(server: ForkServer | None) -> None:
    """Fork from this server from now on; from a new one if it is None."""
    global _current
    _current = server


def _give_up(server: ForkServer | None) -> None:
    """Fork from another one from now on. This one ends with the last of its processes."""
    with _changing:
        if _current is server:
            use(None)


def kill_server() -> None:
    """Kill the present one, and with it its processes, without waiting: this process ends without its exit handlers."""
    if _current is not None:
        _current.kill()


os.register_at_fork(after_in_child=lambda: use(None))  # a child would share its parent's connection


class ForkedProcess(BaseProcess):
    """A process that the server forks, see `multiprocessing.Process`; it ends with this one.

    `start` waits until the server has imported what it preloads; it raises `CannotFork` if it does not.

    Args:
        abandoned: while `start` waits, it looks whether this is set, and then raises `CannotFork`.
    """

    _start_method = "forkserver"

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...],
        name: str,
        abandoned: threading.Event | None = None,
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.abandoned = abandoned or threading.Event()

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in vars(self).items() if name != "abandoned"}

    @staticmethod
    def _Popen(process: BaseProcess) -> _Forked:  # noqa: N802 - so multiprocessing calls it
        return _Forked(process)

    def give_up_server(self) -> None:
        """Fork from another server from now on: the one that has forked this process does not tell of its end."""
        if self._popen is not None:  # type: ignore[attr-defined]
            _give_up(self._popen.server)  # type: ignore[attr-defined]

    def release(self) -> None:
        """Close its descriptors, once it has ended, or has been killed and does not end, and nobody waits for its
        `sentinel`. Its exit status stays known."""
        if self._popen is not None:  # type: ignore[attr-defined]
            if self._popen.returncode is None:  # type: ignore[attr-defined]
                self._popen.returncode = -signal.SIGKILL  # type: ignore[attr-defined]  # nobody waits for it, at exit either
            self._popen.close()  # type: ignore[attr-defined]


class _Forked(popen_forkserver.Popen):
    """The caller's side of a process; `multiprocessing` calls it.

    Attributes:
        server: what it is forked by; None once it is closed.
        sentinel: its end of a pipe, in which the server writes the process's id, and its exit status at the end.
    """

    server: ForkServer | None = None

    def _launch(self, process: BaseProcess) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(Inherited.of_this_process(), data)
            reduction.dump(spawn.get_preparation_data(process.name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        try:
            try:
                self._ask(data.getbuffer(), process.abandoned)  # type: ignore[attr-defined]
            except (OSError, EOFError, _NoAnswer):  # the server has ended just now, or hangs
                self.close()
                self._ask(data.getbuffer(), process.abandoned)  # type: ignore[attr-defined]
        except (OSError, EOFError) as error:
            self.close()
            raise CannotFork(f"the process that starts ranks has ended, or cannot be started: {error}.") from error
        except CannotFork:
            self.close()
            raise

    def _ask(self, data: memoryview, abandoned: threading.Event) -> None:
        server = self.server = begin()  # it lives as long as one of its processes
        self.sentinel, told = os.pipe()
        received, sent = os.pipe()
        self.finalizer = util.Finalize(self, close_all, (sent, self.sentinel))  # a process whose `sent` is closed ends
        try:
            server.fork([received, told, 1, 2, *self._fds])  # type: ignore[attr-defined]
        finally:
            os.close(received)
            os.close(told)
        _await(server, partial(is_readable, self.sentinel, _LOOK_S), abandoned)
        self.pid = forkserver.read_signed(self.sentinel)
        server.answered = True
        os.set_blocking(sent, False)
        while data:
            _await(server, partial(is_writable, sent, _LOOK_S), abandoned)
            data = data[os.write(sent, data) :]

    def close(self) -> None:
        """See `multiprocessing`; and do not hold the server any more."""
        super().close()
        self.server = None

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """See `multiprocessing`: the exit status, or None."""
        if self.returncode is None and is_readable(self.sentinel, 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = -signal.SIGKILL  # by the system, as the server has ended
        return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)


def _await(server: ForkServer, ready: Callable[[], bool], abandoned: threading.Event) -> None:
    """Wait for a server, or for what it has forked. Only time in which this process runs counts."""
    limit_s, error = (_ANSWERS_S, _NoAnswer) if server.answered else (_IMPORTS_S, CannotFork)
    waited_s = 0.0
    while not ready():
        waited_s += _LOOK_S
        if abandoned.is_set():
            raise CannotFork("the start of the ranks was abandoned.")
        if waited_s > limit_s:
            _give_up(server)
            raise error(
                f"{server} has not answered for {limit_s:g} s. Is it stopped (state T), or does it wait for a disk "
                f"(D)? The next start begins another one."
            )
