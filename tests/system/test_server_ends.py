"""Servers and nodes that are told to end, twice perhaps, or killed: they end at once, and leave nothing for good."""

import asyncio
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from children import exit_code, in_child
from engine_mains import is_alive, started, tiny, wait_for, wait_until
from forked import AsSpawned
from repository import TINY_MOE

from ranks import free_port
from serving import fork_server
from serving.cli import main
from serving.engine import EngineClient, run_node
from serving.engine.wire.stores import RunFolder
from serving.requests import EngineDead
from serving.server import _end_at_once, _Stop


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(temporary: Path) -> list[Path]:
    return sorted(temporary.glob("ubatch-*"))


def is_locked(file: Path) -> bool:
    """Asked of the system: to try it would be to hold it."""
    return f":{file.stat().st_ino} " in Path("/proc/locks").read_text()


def ended_by(pid: int, number: signal.Signals) -> bool:
    """Whether that signal ends the process as the system does: it is neither caught nor ignored."""
    lines = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[:3] == "Sig"
    )
    return not (int(lines["SigCgt"], 16) | int(lines["SigIgn"], 16)) >> (number - 1) & 1


def grow_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 60, time.time() - 60))


def test_a_second_signal_ends_the_server_and_its_engines_at_once(temporary: Path) -> None:
    pid = temporary / "pid"

    def body() -> None:
        async def run() -> None:
            _Stop(_end_at_once)
            RunFolder()
            engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            engine.start()
            pid.write_text(str(engine.pid))
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

        asyncio.run(run())

    begun = time.monotonic()
    assert exit_code(in_child(body)) == 128 + signal.SIGINT
    assert time.monotonic() - begun < 10
    assert wait_until(lambda: not is_alive(int(pid.read_text())))
    assert not folders(temporary)


def test_what_a_killed_server_leaves_the_next_one_removes(temporary: Path) -> None:
    def body() -> None:
        RunFolder()
        time.sleep(60)

    child = in_child(body)
    assert wait_until(lambda: len(list(temporary.glob("ubatch-*/lock"))) == 1)
    (left,) = folders(temporary)
    assert wait_until(lambda: is_locked(left / "lock"))
    grow_old(left)
    own = RunFolder()
    assert folders(temporary) == sorted([left, own.path])  # that server lives
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    grow_old(left)
    grow_old(own.path)
    another = RunFolder()
    assert folders(temporary) == sorted([own.path, another.path])
    own.remove()
    another.remove()
    assert not folders(temporary)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_waits_for_node_0_can_be_ended(number: signal.Signals) -> None:
    options = tiny(2, nnodes=2, node_rank=1, master_port=free_port())
    child = in_child(lambda: run_node(options))
    assert wait_until(lambda: ended_by(child, number))
    os.kill(child, number)
    assert exit_code(child) == -number


async def test_a_node_that_is_told_to_end_says_so() -> None:
    port = free_port()
    node = in_child(lambda: os._exit(run_node(tiny(2, nnodes=2, node_rank=1, master_port=port))))

    async with started(tiny(2, nnodes=2, master_port=port)) as client:
        os.kill(node, signal.SIGTERM)
        assert await wait_for(lambda: client.dead is not None)
        assert isinstance(client.dead, EngineDead)
        assert str(client.dead) == "rank 1 is lost: node 1 was told to end (SIGTERM)."

    assert exit_code(node) == 128 + signal.SIGTERM


def serve_with_few_descriptors(*words: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (28, 28))
    sys.exit(main(["serve", *words]))


@pytest.mark.wide
async def test_a_node_that_is_told_to_end_while_it_starts_says_so() -> None:
    port = free_port()

    def body() -> None:
        server = fork_server.begin()
        os.kill(server._process.pid, signal.SIGSTOP)  # so its rank is never forked
        try:
            status = run_node(tiny(2, nnodes=2, node_rank=1, master_port=port))
        finally:
            server.close()
        os._exit(status)

    node = in_child(body)

    starting = asyncio.create_task(EngineClient.start(tiny(2, nnodes=2, master_port=port)))
    assert await wait_for(lambda: not ended_by(node, signal.SIGTERM))
    os.kill(node, signal.SIGTERM)
    with pytest.raises(EngineDead, match=r"rank 1 is lost: node 1 was told to end \(SIGTERM\)"):
        await starting

    assert exit_code(node) == 128 + signal.SIGTERM


def test_too_few_descriptors_are_refused_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    """A start with too few hung, and obeyed no signal."""
    words = ["--data-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu", "--dtype", "float32"]
    server = AsSpawned().Process(target=serve_with_few_descriptors, args=(str(TINY_MOE), "--port", "0", *words))
    server.start()
    server.join(60)
    said = capfd.readouterr().err
    assert server.exitcode == 2, said
    assert "a process of this run needs at least 64 open files (ranks on this machine: 2)" in said
    assert "Traceback" not in said
