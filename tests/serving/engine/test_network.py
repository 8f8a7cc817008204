"""Which addresses gloo and NCCL listen on: the network of --master-addr, loopback on one machine, or an error."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from network_namespaces import ip, why_not

from serving import network
from serving.network import choose_interface, warn_of_loopback
from ubatch import ConfigError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [each.levelno for each in caplog.records if each.name.startswith("serving")]


@pytest.mark.usefixtures("no_interface")
def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    choose_interface("127.0.0.1")
    assert [os.environ[name] for name in VARIABLES] == ["lo", "=lo"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_interface")
@pytest.mark.parametrize(
    ("chosen", "several", "level"),
    [
        ("lo", False, logging.INFO),
        ("eth7", False, logging.WARNING),
        ("lo,eth7", False, logging.WARNING),
        ("eth7", True, logging.INFO),
    ],
)
def test_who_takes_one_machine_off_loopback_is_told(
    chosen: str, several: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serving")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    choose_interface("127.0.0.1", several=several)
    assert [os.environ[name] for name in VARIABLES] == [chosen, "=lo"], "each variable is a choice of its own"
    assert levels(caplog) == [level]


def test_a_variable_of_nccl_that_nobody_reads_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, {"NCCL_SOCKET_IFNAME": "=eth7"}.get(name, "lo"))
    for has_gpu, level in ((False, logging.INFO), (True, logging.WARNING)):
        caplog.clear()
        caplog.set_level(logging.INFO, "serving")
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        choose_interface("127.0.0.1")
        assert levels(caplog) == [logging.INFO, level]


@pytest.mark.usefixtures("no_interface")
def test_an_unknown_interface_is_an_error_only_with_several_machines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "_interfaces", list)
    with pytest.raises(ConfigError, match="Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"):
        choose_interface("127.0.0.1", several=True)
    with pytest.raises(ConfigError, match=r"no network interface leads to master_addr no-such-host\.invalid"):
        choose_interface("no-such-host.invalid", several=True)
    choose_interface("127.0.0.1")
    assert levels(caplog) == [logging.WARNING]
    assert not set(VARIABLES) & set(os.environ)


def test_a_name_that_is_loopback_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "numeric_address", {"own": "127.0.1.1", "other": "10.1.2.3"}.__getitem__)
    for host in ("127.0.0.1", "127.0.0.2", "10.1.2.3", "other"):
        warn_of_loopback(host)
    assert not caplog.records
    warn_of_loopback("own")
    assert levels(caplog) == [logging.WARNING]
    assert "own is 127.0.1.1 on this machine" in caplog.records[0].getMessage()


SCRIPT = """
import os, sys
import psutil
import torch.distributed as dist
from serving.network import choose_interface
from ubatch import ConfigError
for address in sys.argv[1:]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.pop("NCCL_SOCKET_IFNAME", None)
    try:
        choose_interface(address, several=True)
    except ConfigError as error:
        print(address, "|", error)
        continue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    print(address, "|", *found)
    dist.destroy_process_group()
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    """One interface with addresses of three networks; those of one have a label."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    name = f"ubatch-addresses-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "add", "u0", "type", "veth", "peer", "name", "u1")
        addresses = (["10.91.1.1/24"], ["10.92.1.1/24"], ["10.93.1.1/24", "label", "u0:1"], ["10.91.1.7/24"])
        for address, *label in addresses:
            ip("-n", name, "address", "add", address, "dev", "u0", *label)
        for interface in ("lo", "u0", "u1"):
            ip("-n", name, "link", "set", interface, "up")
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.mark.slow
def test_gloo_listens_on_the_network_of_node_0_or_not_at_all(namespace: str) -> None:
    hosts = ("10.91.1.1", "10.91.1.7", "10.91.1.9", "10.92.1.1", "10.92.1.9", "10.93.1.1", "10.93.1.9", "10.99.1.1")
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", SCRIPT, *hosts]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    told = dict(line.split(" | ") for line in ran.stdout.decode().splitlines())
    assert set(told) == set(hosts), ran.stderr.decode()
    for host in hosts[:3]:
        assert told[host] == "10.91.1.1"
    for host in hosts[3:5]:
        assert "u0 has 10.91.1.1 before it, in another network. Give 10.92.1.1 an interface of its own" in told[host]
    for host in hosts[5:7]:
        assert told[host] == "10.93.1.1"
    assert told["10.99.1.1"].startswith("no network interface leads to master_addr 10.99.1.1")
