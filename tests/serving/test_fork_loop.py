"""What a process that was forked for its caller is, and how its end is told."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import exit_7, say, start, wait_long

from serving import fork_server
from serving.fork_server import ForkServer
from serving.processes import how_it_ended

pytestmark = pytest.mark.ranks


own_variable, own_openblas = partial(os.getenv, "UBATCH_TEST_VARIABLE"), partial(os.getenv, "OPENBLAS_NUM_THREADS")
open_files, cores = partial(resource.getrlimit, resource.RLIMIT_NOFILE), partial(os.sched_getaffinity, 0)


def tell(pipe: Any, *questions: Callable[[], object]) -> None:
    pipe.send([question() for question in questions])


def ask(*questions: Callable[[], object]) -> list[Any]:
    """What a forked process answers."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = start(tell, writer, *questions)
    writer.close()
    assert reader.poll(30)
    answers: list[Any] = reader.recv()
    process.join()
    assert process.exitcode == 0
    return answers


def threads_of_the_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def has_imported() -> dict[str, bool]:
    return {name: name in sys.modules for name in ("serving.engine.rank.process", "torch", "triton", "torch._inductor")}


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def arguments() -> list[str]:
    return sys.argv


@pytest.mark.wide
def test_the_server_has_one_thread_and_touches_no_gpu() -> None:
    """One as users have it, which imports for seconds; else the tests' own."""
    before = fork_server._current
    own = ForkServer.start()
    fork_server.use(own)
    try:
        threads, modules, cuda, blas = ask(threads_of_the_server, has_imported, has_cuda, own_openblas)
        assert threads == 1
        imported = {"serving.engine.rank.process": True, "torch": True, "triton": False, "torch._inductor": False}
        assert modules == imported
        assert not cuda
        assert blas == os.environ.get("OPENBLAS_NUM_THREADS"), "that is the server's alone"
    finally:
        fork_server.use(before)
        own.close()


def test_a_process_is_where_its_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UBATCH_TEST_VARIABLE", "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["one", "two"])
    soft, hard = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        variable, folder, words, files, own = ask(own_variable, os.getcwd, arguments, open_files, handlers)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (variable, folder, words) == ("mine", str(tmp_path), ["one", "two"])
    assert files == (soft - 1, hard)
    assert own == [signal.SIG_DFL, signal.SIG_DFL]


def test_it_has_its_callers_file_mode_mask_and_cores() -> None:
    mask, all_cores = os.umask(0o027), cores()
    os.sched_setaffinity(0, {max(all_cores)})
    try:
        assert ask(umask, cores) == [0o027, {max(all_cores)}]
        assert umask() == 0o027, "starting it has not changed the caller's"
    finally:
        os.sched_setaffinity(0, all_cores)
        os.umask(mask)


def test_it_writes_where_its_caller_writes(capfd: pytest.CaptureFixture[str]) -> None:
    start(say, "here").join()
    assert capfd.readouterr().out == "here\n"


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_how_each_has_ended_is_told() -> None:
    well, badly, killed = start(sys.exit), start(exit_7), start(wait_long)
    assert killed in multiprocessing.active_children()
    killed.kill()
    assert how_it_ended(well) == "died with exit status 0"
    assert how_it_ended(badly) == "died with exit status 7"
    assert how_it_ended(killed) == "was killed by SIGKILL"
    killed.kill()  # ended: nobody else is killed who has its number now
    assert killed not in multiprocessing.active_children()


class Ends:
    """Raises where it is unpickled, as a main module that is imported there may."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return raises, (self._error,)


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit(78), 78, ""),
        (SystemExit(), 0, ""),
        (SystemExit("not here"), 1, "not here\n"),
        (KeyboardInterrupt("by hand"), 1, "KeyboardInterrupt: by hand"),
        (ValueError("wrong"), 1, "ValueError: wrong"),
    ],
    ids=repr,
)
def test_one_that_ends_before_it_runs_ends_as_if_spawned(
    error: BaseException, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start(print, Ends(error))
    assert how_it_ended(process) == f"died with exit status {status}"
    written = capfd.readouterr().err
    assert said in written
    assert bool(said) == bool(written)
