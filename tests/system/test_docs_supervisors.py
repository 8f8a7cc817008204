"""Units for systemd and the manifest for Kubernetes in docs/restarts.md: paths, time-outs and flags are the server's."""

from __future__ import annotations

import re
import shlex
from configparser import ConfigParser
from typing import Any

import pytest
import yaml
from api_clients import app_of
from documents import sections
from fake_engine import FakeEngine

from serving.options import SERVE, merge, read_layers

BLOCKS = [block for section in sections() if section.document.name == "restarts.md" for block in section.blocks]
DRAIN_S = merge()["drain_timeout_s"]


def units() -> dict[str, ConfigParser]:
    """The units by their names."""
    found = {}
    for block in BLOCKS:
        if block.language == "ini":
            unit = ConfigParser(interpolation=None)
            unit.optionxform = str  # type: ignore[assignment,method-assign]
            unit.read_string(block.text)
            found[block.text.split()[1].rpartition("/")[2]] = unit
    return found


def read(words: list[str]) -> dict[str, Any]:
    """What `ubatch serve` makes of them."""
    command = words.index("serve")
    assert words[command - 1].endswith("ubatch")
    layers, _ = read_layers(SERVE, "ubatch serve", "", words[command + 1 :])
    return {name: setting.value for name, setting in layers[-1].items()}


def test_the_unit_starts_this_server_and_lets_it_drain() -> None:
    assert sorted(units()) == ["ubatch-live.service", "ubatch-live.timer", "ubatch.service"]
    service = units()["ubatch.service"]["Service"]
    given = read(shlex.split(service["ExecStart"]))
    assert (given["data_parallel_size"], given["enable_expert_parallel"]) == (2, True)
    assert float(service["TimeoutStopSec"]) > DRAIN_S
    assert (service["KillMode"], service["OOMPolicy"]) == ("mixed", "continue")
    commands = service["ExecStartPost"] + units()["ubatch-live.service"]["Service"]["ExecStart"]
    assert re.findall(r"http://127.0.0.1:(\d+)(/\w+)", commands) == [("8000", "/health"), ("8000", "/live")]
    assert merge()["port"] == 8000


def test_the_manifest_asks_what_is_there_and_waits_longer_than_the_server() -> None:
    (block,) = [block for block in BLOCKS if block.language == "yaml"]
    pod = yaml.safe_load(block.text)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert read(container["command"])["host"] == "0.0.0.0"
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/health", "liveness": "/live", "readiness": "/health"}
    there = app_of(FakeEngine(), described=True).openapi()["paths"]
    assert set(paths.values()) <= set(there)
    pauses_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pauses_s + DRAIN_S
    assert container["ports"][0]["containerPort"] == merge()["port"]
    assert probes["liveness"]["failureThreshold"] > 1


@pytest.mark.parametrize("name", ["max_engine_restarts", "engine_restart_window_s", "resume_timeout_s", "timeout_s"])
def test_the_table_of_settings_has_the_defaults(name: str) -> None:
    from serving.options.flags.server_flags import MAX_ENGINE_RESTARTS
    from serving.options.sources import spelled_flag

    (page,) = {section.document for section in sections() if section.document.name == "restarts.md"}
    (row,) = re.findall(rf"^\| `{spelled_flag(name)}` \| (\S+) \|", page.read_text(encoding="utf-8"), re.M)
    default = MAX_ENGINE_RESTARTS if name == "max_engine_restarts" else merge()[name]
    assert float(row) == default
