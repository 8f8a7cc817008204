"""The process that ranks are forked from: that it serves, ends and is replaced, and that nobody outlives anybody."""

import ctypes
import multiprocessing
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import exit_code, in_child
from engine_mains import is_alive, tiny, wait_until
from forked import exit_7, forked_server, own_server, say, start, wait_long

from serving import fork_server, processes
from serving.engine import EngineOptions
from serving.engine.launch import LocalEngines
from serving.engine.wire.rendezvous import Place
from serving.fork_server import CannotFork, ForkedProcess, ForkServer
from serving.processes import Orphaned, check_parent, how_it_ended, is_dead, kill, process_state

pytestmark = pytest.mark.ranks


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with own_server() as own:
        yield own


def pid_of(server: ForkServer) -> int:
    return int(server._process.pid)  # type: ignore[attr-defined]


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


@pytest.mark.wide
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


def test_a_child_of_a_fork_leaves_its_parents_server_alone(server: ForkServer) -> None:
    assert exit_code(in_child(lambda: None)) == 0
    assert pid_of(fork_server.begin()) == pid_of(server)


def test_another_environment_gets_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that the first one has loaded have read the other one."""
    before, children, ends = fork_server._current, [], []

    def begin() -> ForkServer:
        ours, theirs = socket.socketpair()
        children.append(Mock())
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
        assert not children[0].kill.called, "its processes run"
        del first
        assert children[0].kill.called
        ends[1].close()
        assert fork_server.begin() is not second, "that one has ended"
        fork_server._current.close()  # type: ignore[union-attr]
    finally:
        fork_server.use(before)
        for each in ends:
            each.close()


# -- how a process of ours has ended, and how all that still run are ended ---------------------------------------------


SPAWN = multiprocessing.get_context("spawn")


def test_those_that_run_are_killed_and_that_is_told() -> None:
    check_parent()  # this process is nobody's child
    running, ended, never = (SPAWN.Process(target=time.sleep, args=(seconds,)) for seconds in (600, 0, 0))
    for process in (running, ended):
        process.start()
    ended.join()
    kill([running, ended, never])
    assert how_it_ended(running) == "was killed by SIGKILL"
    assert how_it_ended(ended) == "died with exit status 0"


def test_a_process_is_dead_once_all_of_its_threads_have_ended() -> None:
    """Its main thread alone does not tell: another one may wait for a driver."""

    def body() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit: of this thread alone

    child = in_child(body)
    assert wait_until(lambda: process_state(child) == "Z")
    assert not is_dead(child)
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: is_dead(child))
    assert exit_code(child) == -signal.SIGKILL
    assert not is_dead(child)


def test_one_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KILLED_S", 0.1)
    stuck = Mock(pid=7, exitcode=None)
    assert kill([stuck]) == [stuck]
    (limit_s,) = stuck.join.call_args.args
    assert 0 < limit_s <= 0.1
