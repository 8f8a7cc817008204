"""`ubatch bench link`: the link itself, what it reckons, what it leaves behind, and a short run.

What needs root and /dev/net/tun is skipped where they are missing.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from network_namespaces import ip, why_not
from repository import ROOT, TINY_MOE
from served import wait_until

from serving.cli import main
from serving.workbench.bench.link import command, report
from serving.workbench.bench.link import network as networks
from serving.workbench.bench.link.command import Arm, Deployment, Servers
from serving.workbench.bench.link.network import Network, Speed, network, probe
from ubatch import ConfigError, UBatchError

SHORT = ["--model", str(TINY_MOE), "--loads", "8x32x8", "--blocks", "1", "--repeats", "1"]


@pytest.fixture
def linkable() -> None:
    """Skip where there can be no link."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"may not open /dev/net/tun: {error.strerror}")


@pytest.fixture
def joined(linkable: None) -> Iterator[Network]:
    with network() as made:
        yield made


def namespaces(of: int) -> list[str]:
    """What a process's run has."""
    folder = Path("/run/netns")
    return sorted(each.name for each in folder.glob(f"ubatch-link-{of}-*")) if folder.is_dir() else []


# -- the link ------------------------------------------------------------------------------------------------------


def test_delay_and_rate_of_each_direction(joined: Network) -> None:
    slow = Speed(2000, 40)
    joined.link.set(slow)
    seen = probe(joined.hosts, slow)
    assert 4000 <= seen.round_trip_us < 40_000
    assert 5 < seen.forth_mbit < 42
    assert 5 < seen.back_mbit < 42


def test_the_link_changes_under_an_open_connection(joined: Network) -> None:
    near, far = joined.hosts
    with far.entered():
        listener = socket.create_server((far.address, 0))
    with listener, near.entered():
        client = socket.create_connection(listener.getsockname(), timeout=10)
        server, _ = listener.accept()
    seconds = []
    with client, server:
        for delay_us in (50_000, 0, 50_000):
            joined.link.set(Speed(delay_us, 0))
            start = time.perf_counter()
            client.send(b"ping")
            assert server.recv(4) == b"ping"
            server.send(b"pong")
            assert client.recv(4) == b"pong"
            seconds.append(time.perf_counter() - start)
    assert min(seconds[0], seconds[2]) > 0.1 > seconds[1]


_LATE_RANK = """
import sys, time, torch, torch.distributed as dist
from statistics import median
from ubatch import CommGroup, all_to_all_single
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
group, x, seconds = CommGroup.from_process_group(timeout_s=20.0), torch.ones(2, 1 << 18), []
for _ in range(9):
    start = time.perf_counter()
    time.sleep(0.01 * rank)
    all_to_all_single(x, group)
    seconds.append(time.perf_counter() - start)
print(median(seconds))
"""


@pytest.mark.wide
def test_both_directions_of_the_link_carry_at_once_though_a_rank_is_late(joined: Network) -> None:
    """A MiB each way at 200 Mbit/s takes 44 ms; over one connection the directions took turns: 84 ms."""
    joined.link.set(Speed(1000, 200))
    command_line = [sys.executable, "-c", _LATE_RANK]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": networks.INTERFACE, "OMP_NUM_THREADS": "1"}
    address, ranks = f"tcp://{joined.hosts[0].address}:29411", []
    for rank, host in enumerate(joined.hosts):
        with host.pinned():
            words = [*command_line, str(rank), address]
            ranks.append(subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    try:
        seconds = [float(each.communicate(timeout=60)[0].split()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert 0.04 < min(seconds) < 0.07, seconds


def test_the_hosts_are_apart_and_gone_afterwards(joined: Network) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    cores = os.sched_getaffinity(0)
    with joined.hosts[0].pinned():
        assert os.readlink("/proc/thread-self/ns/net") != before
        assert os.sched_getaffinity(0) == {joined.hosts[0].core}
        assert {name for _, name in socket.if_nameindex()} == {"lo", networks.INTERFACE}
    assert (os.readlink("/proc/thread-self/ns/net"), os.sched_getaffinity(0)) == (before, cores)
    assert namespaces(os.getpid()) == [host.name for host in joined.hosts]


def test_nothing_is_left_after_an_error(linkable: None) -> None:
    with pytest.raises(UBatchError, match="failed"), network():
        raise UBatchError("it failed")
    assert namespaces(os.getpid()) == []


def test_what_a_killed_run_left_behind_is_removed(linkable: None, capfd: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"ubatch-link-{gone.pid}-1"
    ip("netns", "add", name)
    with subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"]) as server:
        wait_until(lambda: str(server.pid) in pids_in(name), "it runs there")
        with network():
            assert server.wait(10) == -signal.SIGKILL
            assert namespaces(gone.pid) == []
    assert f"removed {name}" in capfd.readouterr().err


def pids_in(name: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    ("where", "name", "value", "needs"),
    [
        (os, "geteuid", lambda: 1000, "it needs root"),
        (networks, "_DEVICE", Path("/dev/net/no-tun"), "it needs Linux with /dev/net/no-tun"),
        (networks.shutil, "which", lambda _: None, "it needs Linux"),
    ],
)
def test_where_there_can_be_no_link_it_says_so(
    where: Any, name: str, value: Any, needs: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(where, name, value)
    assert main(["bench", "link", *SHORT]) == 2
    out, error = capfd.readouterr()
    (line,) = error.splitlines()
    assert out == ""
    assert line.startswith("ubatch bench link: it needs ")
    assert needs in line or name == "_DEVICE"


# -- options -------------------------------------------------------------------------------------------------------


def test_what_links_arms_and_loads_are_called() -> None:
    assert str(Speed.parse("0:0")) == "0 us, unlimited"
    assert Speed.parse("0.5:1e3") == Speed(0.5, 1000)
    assert Arm.parse("three-lanes").flags[1] == "--ubatch-size=3"
    assert Arm.parse("tuned=--enable-dbo --config 'a b.yaml'") == Arm("tuned", ("--enable-dbo", "--config", "a b.yaml"))
    assert str(report.Load.parse("8x32x4")) == "8x32x4: 8 x 32 in, 4 out"
    tasks = report.LOADS["mixed"].tasks(TINY_MOE)
    assert [task.index for task in tasks] == list(range(32))
    assert {(len(task.prompt), task.max_tokens) for task in tasks} == {(512, 16), (64, 64)}
    assert tasks == report.LOADS["mixed"].tasks(TINY_MOE)


# -- figures -------------------------------------------------------------------------------------------------------


def a_run(seconds: float, answers: list[str], overlapped: int = 0) -> report.Run:
    ends = [seconds * (index + 1) / len(answers) for index in range(len(answers))]
    return report.Run(seconds, ends, [*answers], overlapped, 10)


def test_figures_compare_with_the_first_arm(capsys: pytest.CaptureFixture[str]) -> None:
    answers = list("abcdefghij" * 4)
    runs = {
        "serial": [a_run(each, answers) for each in (4.0, 4.0, 8.0, 8.0)],
        "two": [a_run(each, answers, 9) for each in (4.0, 2.0, 8.0, 4.0)],
    }
    runs["two"][2].answers[0] = "x"
    figures = report.figures_by_arm(runs, 2, changed=True)
    two = figures["two"]
    assert (two.speedup.median, two.whole.median) == (1.5, 24 / 18)
    assert (figures["serial"].of_fastest, two.of_fastest) == (18 / 24, 1.0)
    assert (figures["serial"].learned, two.learned) == (0.5, 1.0)
    assert (two.same, two.requests, figures["serial"].same) == (39, 40, 40)
    assert (two.overlapped, two.steps) == (36, 40)
    assert two.halves.before.median == two.halves.after.median == 1.5
    assert two.halves.series[0] == [10.0] * 4
    report.print_load(report.LOADS["decode"], figures, {"serial": [9.0], "two": [10.0]})
    shown = capsys.readouterr().out
    assert "39 of 40" in shown
    assert "requests/s by tens, last run: 10.00 10.00 10.00 10.00" in shown


def test_all_loads_are_pooled_by_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(serial_s: float, two_s: float) -> dict[str, report.ArmFigures]:
        runs = {"serial": [a_run(serial_s, ["a"])] * 2, "two": [a_run(two_s, ["a"])] * 2}
        return report.figures_by_arm(runs, 1, changed=False)

    loads = {"prefill": figures(2.0, 1.0), "decode": figures(10.0, 11.0)}
    assert {name: own.median for name, own in report.pooled(loads).items()} == {"serial": 1.0, "two": 1.0}
    report.print_pooled(loads)
    assert "all loads (40 steps of serial), whole runs over serial: two 1.00 [0.91, 2.00]" in capsys.readouterr().out


def test_arms_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free, running = [10 << 30], []

    @contextmanager
    def start(arm: Arm) -> Iterator[Deployment]:
        free[0] -= 3 << 30
        running.append(arm.name)
        try:
            yield SimpleNamespace(processes=())  # type: ignore[misc]
        finally:
            running.remove(arm.name)

    monkeypatch.setattr(command, "available_memory", lambda: free[0])
    monkeypatch.setattr(command, "_IDLE_S", 0.01)
    arms = list(map(Arm.parse, ("serial", "dbo", "three-lanes", "two-lanes")))
    with pytest.raises(ConfigError, match=r"take 3\.0 GiB, and 3 arms more do not fit into the 7\.0 GiB left"):
        Servers(start, arms).__enter__()
    free[0] = 10 << 30
    with Servers(start, arms[:2]) as servers:
        assert running == ["serial", "dbo"]
        with servers.of(arms[1]):
            assert running == ["serial", "dbo"]
        with servers.of(arms[2]):  # not kept
            assert running == ["serial", "dbo", "three-lanes"]
    assert running == []


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_a_short_run(tmp_path: Path, linkable: None) -> None:
    file = tmp_path / "link.json"
    assert main(["bench", "link", *SHORT, "--arms", "two-lanes", "--links", "200:500", "--json", str(file)]) == 0
    (link,) = json.loads(file.read_text())["links"]
    assert link["probes"][0]["round_trip_us"] >= 400
    assert len(link["start_s"]["two-lanes"]) == 2, "it was started anew for every visit"
    own = link["loads"]["8x32x8"]["two-lanes"]
    assert (len(own["seconds"]), own["same"], own["requests"]) == (2, 8, 8)
    assert 0 < own["overlapped"] <= own["steps"]
    assert [run["seconds"] for run in link["runs"]["8x32x8"]["two-lanes"]] == own["seconds"]


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_the_link_changes_under_load_of_kept_servers(
    tmp_path: Path, linkable: None, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "link.json"
    words = ["bench", "link", *SHORT, "--arms", "two-lanes", "--links", "0:0", "30000:0", "--loads", "20x8x4"]
    assert main([*words, "--live", "--change", "--json", str(file)]) == 0
    assert "arms kept: 1; idle, their servers use" in capfd.readouterr().out
    (link,) = json.loads(file.read_text())["links"]
    assert link["link"] == ["0 us, unlimited", "30000 us, unlimited"]
    start_s = link["start_s"]["two-lanes"]
    assert start_s == [start_s[0]] * 2, "it was started once"
    own = link["loads"]["20x8x4"]["two-lanes"]
    assert own["same"] == 20
    for before, after in own["halves"]["series"]:
        assert before > 1.5 * after, "the second half has the longer delay"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, linkable: None) -> None:
    words = ["bench", "link", *SHORT, "--arms", "serial", "--links", "0:0", "--loads", "64x64x64"]
    process = subprocess.Popen([sys.executable, "-m", "serving.cli", *words], cwd=ROOT, start_new_session=True)
    try:
        servers = [f"ubatch-link-{process.pid}-{host}" for host in (0, 1)]
        wait_until(lambda: all(map(pids_in, servers)), "servers start", 60)
        pids = [pid for name in servers for pid in pids_in(name)]
        time.sleep(5 if number == signal.SIGTERM else 0)  # in the start, or later
        os.kill(process.pid, number)
        assert process.wait(40) == {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 130}[number]
        assert namespaces(process.pid) == []
        assert not [pid for pid in pids if pid != str(process.pid) and Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()
        process.wait()


def test_the_first_signal_ends_it_and_the_next_are_ignored() -> None:
    def interrupted() -> None:
        with command.signals_end_it():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                cleaned.append(True)

    cleaned: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        interrupted()
    assert ended.value.code == 128 + signal.SIGTERM
    assert (cleaned, signal.getsignal(signal.SIGTERM)) == ([True], before)
