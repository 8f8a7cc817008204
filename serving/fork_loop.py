"""What runs in the process that ranks are forked from (`fork_server`), and in each that it forks until its work begins.

The server has one thread, as a fork takes only one along; it never touches a GPU; and it does not import Triton.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Set
from contextlib import suppress
from multiprocessing import forkserver, spawn
from typing import Any, NamedTuple, NoReturn

PRELOADED = (
    "serving.engine.rank.process",
    "serving.fork_server",
    "attention.backends.native",
    "attention.backends.torch",
    "moe.experts.cpu",
)
"""Modules that the server imports, and all that these import."""
_IGNORED = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 64
_reading_umask = threading.Lock()


def serve(connection: int) -> NoReturn:
    """Main function of a server: import, then fork for whoever has the other end of the socket, until it is closed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    for name in PRELOADED:
        importlib.import_module(name)
    serve_imported(connection, before)


def serve_imported(connection: int, before: Mapping[signal.Signals, Any]) -> NoReturn:
    """As `serve`, in a process that has imported all.

    Args:
        before: handlers of signals, for the processes.
    """
    gc.collect()
    gc.freeze()  # what is imported is no garbage, and is shared as long as nobody writes to it
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {**before, signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None)}
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    told: dict[int, int] = {}  # process id -> where to write its exit status
    caller = socket.socket(fileno=connection)
    watched = select.poll()  # `select` would refuse descriptors from 1,024 on, and the caller's may have any number
    for each in (caller.fileno(), woken):
        watched.register(each, select.POLLIN)
    while True:
        ready = {each for each, _ in watched.poll()}
        if woken in ready:
            os.read(woken, 1 << 12)
            _tell_of_ended(told)
        if caller.fileno() in ready:
            asked, descriptors, _, _ = socket.recv_fds(caller, 1, _MOST_DESCRIPTORS)
            if not asked:
                os._exit(0)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)
                close_all(caller.detach(), woken, wake, *told.values())
                _run_forked(server, *descriptors)
            _, told[pid], *_ = descriptors
            with suppress(BrokenPipeError):  # the caller has not waited so long
                forkserver.write_signed(told[pid], pid)
            close_all(*(each for each in descriptors if each != told[pid]))


def _tell_of_ended(told: dict[int, int]) -> None:
    while told:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with suppress(BrokenPipeError):  # nobody waits for it any more
            forkserver.write_signed(told[pid], os.waitstatus_to_exitcode(status))
        close_all(told.pop(pid))


def close_all(*descriptors: int) -> None:
    for each in descriptors:
        os.close(each)


# -- the process -------------------------------------------------------------------------------------------------------


class Inherited(NamedTuple):
    """What a process that is spawned would inherit from its caller."""

    environ: Mapping[str, str]
    open_files: tuple[int, int]
    umask: int
    cores: Set[int] | None

    @classmethod
    def of_this_process(cls) -> Inherited:
        with _reading_umask:
            umask = os.umask(0o077)  # it can only be read by setting it; files of other threads may be too private
            os.umask(umask)
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        return cls(dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE), umask, cores)

    def take(self) -> None:
        """Make them this process's."""
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)
        os.umask(self.umask)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)


def _run_forked(server: int, received: int, told: int, out: int, err: int, *others: int) -> NoReturn:
    """Main function of a process.

    Args:
        received: pipe in which the caller writes what to run; its other end is closed when the caller ends.
        told: not for this process.
        out, err: the caller's standard output and error.
        others: descriptors within what is received.
    """
    status = 1
    try:
        if sys.platform == "linux":  # elsewhere a rank notices within a second (`check_parent`)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        os.dup2(out, 1)
        os.dup2(err, 2)
        close_all(told, out, err)
        forkserver._forkserver._inherited_fds = list(others)  # type: ignore[attr-defined]  # `DupFd` takes them there
        status = _main(received)
    except SystemExit as exit:  # of the main module while it is imported; later ones are statuses already
        status = _status_of(exit)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status_of(exit: SystemExit) -> int:
    """As the interpreter ends with it."""
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)
    return 1


def _main(received: int) -> int:
    """As `multiprocessing.spawn._main`."""
    caller = os.dup(received)
    itself = multiprocessing.current_process()
    with os.fdopen(received, "rb") as file:
        itself._inheriting = True  # type: ignore[attr-defined]
        try:
            try:
                inherited: Inherited = pickle.load(file)
            except EOFError:  # the caller has not waited so long
                return 1
            inherited.take()
            spawn.prepare(pickle.load(file))
            process = pickle.load(file)
        finally:
            del itself._inheriting  # type: ignore[attr-defined]
    status: int = process._bootstrap(caller)
    return status
