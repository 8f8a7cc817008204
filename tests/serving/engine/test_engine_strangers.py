"""What another user of the machine can do to a run: connect to nothing but the API, read nothing, write nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_mains import started, tiny, tokens_of
from test_engine_network import PROMPTS, SHORT, sockets

from serving import network
from serving.engine import EngineClient
from serving.engine.rank import listeners
from serving.engine.rank.listeners import refuse_strangers

NOBODY = 65534
CONNECTIONS = 300

STRANGER = """
import encodings.idna, json, os, socket, sys
from pathlib import Path

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ports, folder, many = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
open_, told = [], {"uid": os.geteuid(), "connected": 0, "read": [], "written": []}
for host, port in ports:
    for _ in range(many):
        try:
            open_.append(socket.create_connection((host, port), timeout=0.1))
            told["connected"] += 1
        except OSError:
            break
try:
    told["read"] = os.listdir(folder)
except OSError:
    pass
for name in ("store/client", "client", "turns-1", "store/ranks%2F0.part/failed"):
    try:
        (folder / name).write_text("127.0.0.1:1")
        told["written"].append(name)
    except OSError:
        pass
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(str(folder / name))
            told["connected"] += 1
        except OSError:
            pass
print(json.dumps(told), flush=True)
sys.stdin.read()
"""


def as_nobody(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STRANGER, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )


def told_by(stranger: subprocess.Popen[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(stranger.stdout.readline())
    assert told["uid"] == NOBODY
    return told


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a process as another user")


def descriptors(client: EngineClient) -> dict[int, int]:
    return {rank: psutil.Process(pid).num_fds() for rank, pid in client.pids.items()}


@pytest.mark.wide
async def test_another_user_reaches_nothing_of_a_run() -> None:
    before = sockets()
    async with started(tiny(2, expert_parallel=True)) as client:
        expected = [await tokens_of(client, name, prompt, SHORT) for name, prompt in PROMPTS.items()]
        ports, held = sorted(sockets() - before), descriptors(client)
        assert ports, "gloo listens"
        stranger = as_nobody(json.dumps(ports), str(client._runs.run.host._folder.path), str(CONNECTIONS))
        try:
            told = await asyncio.to_thread(told_by, stranger)
            assert (told["connected"], told["read"], told["written"]) == (0, [], [])
            assert descriptors(client) == held
            tokens = [await tokens_of(client, f"{name} again", prompt, SHORT) for name, prompt in PROMPTS.items()]
            assert tokens == expected
        finally:
            stranger.communicate("")


@pytest.mark.parametrize("accepted", ["before", "while the ports are closed to strangers"])
def test_a_strangers_connection_that_came_during_the_start_is_ended(
    accepted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown with a listening socket of this process. gloo keeps such connections for good."""
    strangers: list[socket.socket] = []

    def accept_and_admit_no_more(each: socket.socket) -> None:
        if not strangers and each.getsockname() == listener.getsockname():
            strangers.append(listener.accept()[0])
        network.admit_no_more(each)

    monkeypatch.setattr(listeners, "admit_no_more", accept_and_admit_no_more)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as own,
        listener.accept()[0] as taken,
    ):
        stranger = as_nobody(json.dumps([listener.getsockname()]), str(tmp_path), "1")
        try:
            assert told_by(stranger)["connected"] == 1
            if accepted == "before":
                strangers.append(listener.accept()[0])
            refuse_strangers()
            with strangers[0] as strange:
                strange.settimeout(5)
                assert strange.recv(1) == b"", "it was ended"
            own.sendall(b"x")
            assert taken.recv(1) == b"x", "this user's is not"
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=0.2)
        finally:
            stranger.communicate("")
