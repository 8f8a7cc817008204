"""How ranks and nodes begin and end.

What a rank does before it says that it is ready, for which its peers wait; and a node that joins: it waits for node 0
as long as its machine answers, and says what it waits for. Servers and nodes that are told to end, twice perhaps, or
killed: they end at once, and leave nothing for good.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from children import exit_code, in_child
from engine_mains import (
    Served,
    is_alive,
    run_engine_that_connects_to_nobody,
    run_engine_that_finds_the_other_gone,
    started,
    tiny,
    wait_for,
    wait_until,
)
from forked import AsSpawned, own_server
from repository import MODELS, TINY_MOE

from ranks import free_port
from serving import fork_server
from serving.cli import main
from serving.engine import EngineClient, EngineCore, EngineOptions, node, run_node
from serving.engine.node import _await_node_0
from serving.engine.rank import process
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire.rendezvous import Run
from serving.engine.wire.stores import RunFolder
from serving.network import admit_no_more
from serving.requests import EngineDead
from serving.scheduler import SchedulerConfig
from serving.server import _end_at_once, _Stop
from ubatch import UBatchConfig, UBatchError
from ubatch.process import job_store

# -- starting ----------------------------------------------------------------------------------------------------------


def test_a_rank_whose_parent_ends_while_it_starts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a rank that has ended, too: for five minutes, since the store is no process any more."""

    def body() -> None:
        monkeypatch.setattr(process, "_LOOK_OUT_S", 0.1)
        ours, parents = os.pipe()
        os.close(parents)  # as the system does when a process ends
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=-1, sentinel=ours))
        with process.beating(Mock(), 0):
            time.sleep(20)

    begun = time.monotonic()
    assert exit_code(in_child(body)) == 1
    assert time.monotonic() - begun < 10


async def test_a_start_that_waits_for_the_process_that_forks_ranks_can_be_given_up() -> None:
    """It waits in a thread, which nobody can cancel."""
    begun = time.monotonic()
    with own_server() as server:
        os.kill(server._process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(EngineClient.start(tiny()), 0.5)
    assert time.monotonic() - begun < 10


def test_peers_wait_for_a_rank_that_makes_its_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is collective: a draft network that takes long to load or capture must not come after."""
    late: dict[str, bool] = {}
    make_core = process.make_core

    def noted(*args: Any) -> EngineCore:
        late["make_core"] = bool(job_store._own.blocks)
        return make_core(*args)

    monkeypatch.setattr(process, "make_core", noted)
    speculation = SpeculationConfig(Algorithm.EAGLE, 2, 2, draft_model_path=MODELS / "tiny-moe-eagle")
    options = EngineOptions(
        MODELS / "tiny-moe",
        scheduler=SchedulerConfig(max_model_len=512),
        speculation=speculation,
        kv_cache_memory=1 << 20,
    )
    monkeypatch.setattr(gc, "freeze", lambda: late.setdefault("freeze", bool(job_store._own.blocks)))
    with process._loaded(options, 0, Run.open(dist.HashStore(), None), Mock()):
        assert late == {"make_core": True, "freeze": True}
        assert list(late)[-1] == "freeze", "the collector need not walk through the draft network, either"
        assert not job_store._own.blocks


@pytest.mark.ranks
def test_a_rank_that_ends_while_ranks_connect_is_named_and_not_the_one_that_notices() -> None:
    with pytest.raises(EngineDead, match="rank 1 died with exit status 3"):
        Served(tiny(2, expert_parallel=True), run_engine_that_finds_the_other_gone)


@pytest.mark.wide
@pytest.mark.ranks
def test_what_a_rank_that_is_killed_while_it_connects_leaves_is_removed_with_the_run() -> None:
    """Its socket lay in the system's temporary folder, where nobody removed it."""
    with pytest.raises(EngineDead, match="in the run's folder: True"):
        Served(tiny(2, expert_parallel=True), run_engine_that_connects_to_nobody)


# -- a node that joins -------------------------------------------------------------------------------------------------


TIMEOUT_S = 0.5


def node_1(port: int) -> EngineOptions:
    return tiny(2, nnodes=2, node_rank=1, master_port=port, dbo=UBatchConfig(timeout_s=TIMEOUT_S))


def test_a_node_0_from_which_nothing_comes_back_is_named() -> None:
    """Packets are swallowed: by a network, a firewall, or a run whose nodes are complete. This took five minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        admit_no_more(listener)
        begun = time.monotonic()
        with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 cannot be reached: .* \(timed out\)"):
            run_node(node_1(listener.getsockname()[1]))
        assert time.monotonic() - begun < 3 * TIMEOUT_S


def test_a_node_0_that_accepts_and_then_says_nothing_is_named() -> None:
    """Its process is stopped. This took five minutes, as connecting to the store did not count."""

    def body() -> None:  # in a child, because the thread that connects goes on
        with pytest.raises(UBatchError, match=r"cannot be reached: it has accepted a connection, and then has said"):
            run_node(node_1(listener.getsockname()[1]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        assert exit_code(in_child(body)) == 0
        assert time.monotonic() - begun < 6 * TIMEOUT_S


@pytest.mark.long
def test_a_node_0_that_is_started_later_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving")
    port = free_port()
    waiting = threading.Thread(target=_await_node_0, args=(node_1(port), 60.0, Mock(number=0)), daemon=True)
    waiting.start()
    waiting.join(3 * TIMEOUT_S)
    assert waiting.is_alive(), "its machine answers"
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(10)
        assert not waiting.is_alive()
    (said,) = caplog.messages
    assert said.startswith("waiting for node 0")


def test_a_node_0_that_is_never_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PATIENCE", node.PATIENCE * 0)
    with pytest.raises(UBatchError, match=r"^node 0 does not listen at 127\.0\.0\.1:.*Is it running\?"):
        run_node(node_1(free_port()))


@pytest.mark.long
def test_a_node_that_is_ended_while_it_waits_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    port = free_port()
    child = in_child(lambda: run_node(node_1(port)))
    time.sleep(1.0)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["post_node", "claim_node"])
def test_a_node_0_that_leaves_while_a_node_joins_is_named(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has failed, and the next one can be joined: a node that is started again ended with a traceback."""
    monkeypatch.setattr(node, "connect_store", Mock())
    monkeypatch.setattr(node, "post_node", Mock())
    monkeypatch.setattr(node, "join_run", Mock(return_value=(Mock(), node_1(0))))
    monkeypatch.setattr(node, step, Mock(side_effect=dist.DistNetworkError("Connection reset by peer")))
    with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has left .* \(Connection reset by peer\)"):
        node._join(Mock(), node_1(0))


# -- ending ------------------------------------------------------------------------------------------------------------


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
