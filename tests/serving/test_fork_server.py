"""The process that ranks are forked from: what its processes see, how they end, and that nobody outlives anybody."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import exit_code, in_child
from engine_mains import is_alive, tiny, wait_until
from forked import forked_server, own_server

from serving import fork_server, processes
from serving.engine import EngineOptions
from serving.engine.launch import LocalEngines
from serving.engine.wire.rendezvous import Place
from serving.fork_server import CannotFork, ForkedProcess, ForkServer
from serving.processes import Orphaned, check_parent, how_it_ended, is_dead

pytestmark = pytest.mark.ranks


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with own_server() as own:
        yield own


def start(target: Callable[..., object], *args: Any) -> ForkedProcess:
    process = ForkedProcess(target=target, args=args, name="rank 0")
    process.start()
    return process


def pid_of(server: ForkServer) -> int:
    return int(server._process.pid)  # type: ignore[attr-defined]


# -- what a process is -------------------------------------------------------------------------------------------------


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


def own_variable() -> str | None:
    return os.environ.get("UBATCH_TEST_VARIABLE")


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)]


def open_files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def arguments() -> list[str]:
    return sys.argv


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


def own_openblas() -> str | None:
    return os.environ.get("OPENBLAS_NUM_THREADS")


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


def say(text: str) -> None:
    print(text, flush=True)


def test_it_writes_where_its_caller_writes(capfd: pytest.CaptureFixture[str]) -> None:
    start(say, "here").join()
    assert capfd.readouterr().out == "here\n"


# -- how it ends -------------------------------------------------------------------------------------------------------


def exit_7() -> None:
    sys.exit(7)


def wait_long() -> None:
    time.sleep(600)


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


def test_signals_that_reach_every_process_do_not_end_the_server(server: ForkServer) -> None:
    start(exit_7).join()  # it serves
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(server), number)
    process = start(exit_7)
    assert how_it_ended(process) == "died with exit status 7"
    assert fork_server._current is server


def test_if_the_server_is_killed_its_processes_are_and_another_one_begins(server: ForkServer) -> None:
    process = start(wait_long)
    os.kill(pid_of(server), signal.SIGKILL)
    assert how_it_ended(process) == "was killed by SIGKILL"
    assert wait_until(lambda: not is_alive(process.pid or 0))
    assert how_it_ended(start(exit_7)) == "died with exit status 7"
    assert fork_server._current is not server


def test_a_server_that_ends_at_once_is_told(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_end() -> ForkServer:
        one = forked_server()
        os.kill(pid_of(one), signal.SIGKILL)
        one._process.wait(10)
        return one

    monkeypatch.setattr(ForkServer, "start", start_and_end)
    server.close()
    fork_server.use(None)
    with pytest.raises(CannotFork, match="has ended"):
        start(exit_7)


def test_a_server_that_does_not_answer_is_named_and_another_one_begins(
    server: ForkServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_IMPORTS_S", 0.3)
    before = open_descriptors()
    os.kill(pid_of(server), signal.SIGSTOP)
    with pytest.raises(CannotFork, match=rf"\({pid_of(server)}, in state T\) has not answered for 0.3 s"):
        start(say, "nobody waits for this one")
    assert open_descriptors() == before
    monkeypatch.undo()
    assert how_it_ended(start(exit_7)) == "died with exit status 7"
    assert fork_server._current is not server
    os.kill(pid_of(server), signal.SIGCONT)  # it forks what nobody waits for any more
    fork_server.use(server)
    assert how_it_ended(start(exit_7)) == "died with exit status 7"
    assert fork_server._current is server
    assert wait_until(lambda: not Path(f"/proc/{pid_of(server)}/task/{pid_of(server)}/children").read_text())
    assert capfd.readouterr() == ("", "")


def test_a_server_that_has_served_and_hangs_is_replaced_at_once(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_ANSWERS_S", 0.3)
    first = start(exit_7)
    first.join()
    os.kill(pid_of(server), signal.SIGSTOP)
    monkeypatch.undo()
    server_of = [each._popen.server for each in (first, start(exit_7))]  # type: ignore[attr-defined]
    assert server_of == [server, fork_server._current]
    assert fork_server._current is not server
    first.release()
    assert first._popen.server is None, "the server ends with the last of its processes"  # type: ignore[attr-defined]


def test_processes_end_though_their_end_is_not_told(server: ForkServer, tmp_path: Path) -> None:
    engines = LocalEngines(tiny(2), Place(tmp_path), exit_soon)
    os.kill(pid_of(server), signal.SIGSTOP)
    begun = time.monotonic()
    assert engines.join(30)
    assert time.monotonic() - begun < 10
    os.kill(pid_of(server), signal.SIGCONT)
    engines.kill()


def exit_soon(options: EngineOptions, rank: int, place: Place) -> None:
    time.sleep(0.5)
    sys.exit(0)


def test_a_start_may_be_abandoned(server: ForkServer) -> None:
    os.kill(pid_of(server), signal.SIGSTOP)
    abandoned = threading.Event()
    threading.Timer(0.3, abandoned.set).start()
    with pytest.raises(CannotFork, match="was abandoned"):
        ForkedProcess(target=wait_long, args=(), name="rank 0", abandoned=abandoned).start()


def wait_as_rank(options: EngineOptions, rank: int, place: Place) -> None:
    wait_long()


def test_engines_of_a_server_that_does_not_answer_end(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other processes of that server go on; the next start begins another one."""
    monkeypatch.setattr(processes, "_TOLD_S", 0.3)
    another = start(wait_long)
    engines = LocalEngines(tiny(2), Place(tmp_path), wait_as_rank)
    os.kill(pid_of(server), signal.SIGSTOP)
    engines.kill()
    assert [engines.exit_status(rank) for rank in (0, 1)] == [-signal.SIGKILL] * 2
    assert all(is_dead(pid) for pid in engines.pids.values())
    assert another.is_alive()
    assert how_it_ended(start(exit_7)) == "died with exit status 7"
    assert fork_server._current is not server


def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pids"

    def body() -> None:
        server = forked_server()
        fork_server.use(server)
        process = start(wait_long)
        told.with_suffix(".new").write_text(f"{pid_of(server)} {process.pid}")
        told.with_suffix(".new").rename(told)
        time.sleep(60)

    caller = in_child(body)
    assert wait_until(told.exists)
    pids = [int(word) for word in told.read_text().split()]
    assert all(map(is_alive, pids))
    os.kill(caller, signal.SIGKILL)
    assert exit_code(caller) == -signal.SIGKILL
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_a_process_sees_that_its_caller_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Caller:
        pid = 1
        sentinel, other = os.pipe()

    monkeypatch.setattr(multiprocessing, "parent_process", lambda: Caller)
    check_parent()
    os.close(Caller.other)
    with pytest.raises(Orphaned, match="is gone"):
        check_parent()
    os.close(Caller.sentinel)


def test_a_caller_may_have_many_open_files() -> None:
    def body() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while os.dup(2) < 1100:
            pass
        fork_server.use(forked_server())
        assert how_it_ended(start(exit_7)) == "died with exit status 7"

    assert exit_code(in_child(body)) == 0


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def exit_as_rank(options: EngineOptions, rank: int, place: Place) -> None:
    sys.exit(rank)


def test_engines_that_have_ended_hold_no_descriptors(tmp_path: Path) -> None:
    """One run follows another, and garbage is not collected between them."""
    before = open_descriptors()
    engines = LocalEngines(tiny(2), Place(tmp_path), exit_as_rank)
    assert open_descriptors() > before
    assert engines.join(30)
    engines.kill()
    assert open_descriptors() == before
    assert [engines.exit_status(rank) for rank in (0, 1)] == [0, 1]
    assert engines.ended(1).text == "died with exit status 1"


def test_a_request_to_a_server_that_has_ended_leaves_no_descriptors(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.close()
    servers = iter([server, forked_server()])
    monkeypatch.setattr(fork_server, "begin", lambda: next(servers))
    before = open_descriptors()
    process = start(exit_7)
    assert how_it_ended(process) == "died with exit status 7"
    process.release()
    assert open_descriptors() == before


# -- which server ------------------------------------------------------------------------------------------------------


def test_a_child_of_a_fork_leaves_its_parents_server_alone() -> None:
    before = fork_server._current
    fork_server.use(forked_server())
    try:
        pid = pid_of(fork_server.begin())
        assert exit_code(in_child(lambda: None)) == 0
        assert pid_of(fork_server.begin()) == pid
    finally:
        fork_server.begin().close()
        fork_server.use(before)


class Child:
    """A server's process that does nothing."""

    ended, pid = False, 0

    def kill(self) -> None:
        self.ended = True

    def wait(self, timeout: float) -> int:
        return 0


def test_another_environment_gets_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that the first one has loaded have read the other one."""
    before, children, ends = fork_server._current, [], []

    def begin() -> ForkServer:
        ours, theirs = socket.socketpair()
        children.append(Child())
        ends.append(theirs)
        return ForkServer(ours, children[-1], dict(os.environ))

    monkeypatch.setattr(ForkServer, "start", begin)
    try:
        fork_server.use(None)
        first = fork_server.begin()
        assert fork_server.begin() is first
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        second = fork_server.begin()
        assert second is not first
        assert not children[0].ended, "its processes run"
        del first
        assert children[0].ended
        ends[1].close()
        assert fork_server.begin() is not second, "that one has ended"
        fork_server._current.close()  # type: ignore[union-attr]
    finally:
        fork_server.use(before)
        for each in ends:
            each.close()
