"""Every command in the documents runs, and prints what is shown; the few that cannot run here are parsed at least.

The units for systemd and the manifest of docs/restarts.md have this server's paths, time-outs and flags.
"""

import ast
import importlib
import re
import secrets
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_clients import app_of
from document_shell import PORT, Shell, stand_in_programs
from documents import DOCUMENTS, Command, Section, sections, unbound_names
from fake_engine import FakeEngine
from repository import ROOT

from moe import ExpertPlacement
from serving import cli
from serving.options import SERVE, merge, read_layers
from serving.options.flags.server_flags import MAX_ENGINE_RESTARTS
from serving.options.sources import spelled_flag

NOT_RUN: Mapping[str, str] = {
    "deepseek-ai/DeepSeek-V2-Lite": "the hub, and 31 GB of weights",
    "--nnodes 2": "two machines; tests/system/test_system_two_hosts.py has them",
    "ubatch bench schedules": "minutes of measuring; tests/serving/workbench has it with fewer steps",
    "ubatch bench peers": "an environment with vLLM; tests/serving/workbench has a stand-in",
    "ubatch bench link": "root, and hours; tests/serving/workbench has short runs",
    "ubatch bench auto": "minutes of measuring; tests/serving/workbench has it with fewer steps",
    "ubatch bench eplb": "what is quick is void; tests/serving/workbench has it, too",
    "ubatch serve MODEL": "a model that the reader has",
}
"""Part of a command -> why its section is not run. The flags are parsed all the same."""
FASTER: Mapping[str, str] = {
    "ubatch tune": "--max-seconds 4 --rounds 1 --modes decode --max-decode-tokens 8 --search-best 0 --lanes 2",
    "ubatch trace examples": "--dtype float32",
    "examples/wrap_module.py": "--tokens 512",
    "examples/wrap_tensor_parallel.py": "--sequences 4",
    "examples/wrap_transformers.py": "--max-new-tokens 4",
}
"""Begin of a command -> flags that make it quick. Figures are those of the document then only in kind."""
IN_CI = ("ubatch completion",)
"""Sections with these run for every change, the others in `make test-slow`."""

SECTIONS = {section.name: section for section in sections()}
COMMANDS = [(section, command) for section in SECTIONS.values() for command in section.commands]
STANDINS = {"MODEL": "examples/models/tiny-moe", "deepseek-ai/DeepSeek-V2-Lite": "examples/models/tiny-moe"}
SETS_UP = re.compile(r"(make|\S*\bpip|git|cd|source|\.|\S*python[\d.]* -m (pip|venv|build)) ")
"""Begin of commands that change this machine, or are a test run of their own: they are not run."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the documents take to be there."""
    for name in ("examples", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write_files(section: Section, folder: Path) -> None:
    """The blocks of a section that are files."""
    for block in section.blocks:
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def reason_not_to_run(section: Section) -> str | None:
    """Why this section's commands cannot run here."""
    found = (why for part, why in NOT_RUN.items() for command in section.commands if part in command.text)
    return next(found, None)


# -- every command, whether or not it can run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "text"),
    [pytest.param(section, command.text, id=f"{section.name}: {command.text[:40]}") for section, command in COMMANDS],
)
def test_the_command_exists_and_takes_these_flags(
    section: Section, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    write_files(section, folder)
    shutil.copy(ROOT / "examples" / "dbo.yaml", folder / "dbo.yaml")
    ExpertPlacement.default(num_layers=4, num_experts=8, num_ranks=8).save(folder / "placement.yaml")
    (folder / "cluster-secret").write_text(secrets.token_hex(32))
    (folder / "cluster-secret").chmod(0o600)
    program, *words = settled(text, monkeypatch)
    if program == "ubatch":
        check_ubatch(words, monkeypatch)
    elif program == "make":
        assert re.search(rf"^([a-z0-9-]+ )*{words[0]}[ :]", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif program == "python" and words[0] != "-m":
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        for flag in (word for word in words[1:] if word.startswith("--")):
            assert f'"{flag}"' in source, f"{words[0]} has no {flag}"
    elif program in ("python", "torchrun", "pip"):
        pass  # run below, or not ours
    else:
        assert shutil.which(program) or program in ("umask", "source"), f"{program}: not a command that a reader has"


def settled(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command's words: its environment is set, what only the reader knows is put in, redirections are left out."""
    text = re.sub(r"\s*(&|2?>\s*\S+|\|.*)\s*$", "", text).strip("()")
    words = [STANDINS.get(word, word) for word in shlex.split(text) if word not in ("[", "]")]
    words = [re.sub(r"^(--model=)?deepseek-ai/.*", rf"\g<1>{STANDINS['MODEL']}", word) for word in words]
    words = ["10.0.0.1" if word == "ADDR" else word for word in words]
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    return words


def check_ubatch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sub-command parse and check its settings; what it would do is left out."""
    if words == ["--version"]:
        return
    name = next((name for name in cli.COMMANDS if words[: len(name.split())] == name.split()), None)
    assert name is not None, f"there is no command {words}"
    ran: list[object] = []
    monkeypatch.setattr(importlib.import_module(cli.COMMANDS[name][0]), "run", lambda options: ran.append(options) or 0)
    assert cli.main(words) == 0
    assert ran


def test_commands_stand_in_fenced_blocks() -> None:
    """Where these tests find them."""
    loose = re.compile(r"^    (\w+=\S+ )*(ubatch|make|python|pip|torchrun) ")
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            assert not loose.match(line), f"{document.name}:{number}: put this command into a ```bash block"


def test_what_is_not_run_is_there() -> None:
    for part in (*NOT_RUN, *FASTER, *IN_CI):
        assert any(part in command.text for _, command in COMMANDS), f"{part!r}: no document has this command any more"


# -- the commands that can run -----------------------------------------------------------------------------------------


def marks_of(section: Section) -> list[pytest.MarkDecorator]:
    quick = any(part in command.text for part in IN_CI for command in section.commands)
    return [] if quick else [pytest.mark.slow]


RUN = [
    pytest.param(name, marks=marks_of(section))
    for name, section in SECTIONS.items()
    if any(not SETS_UP.match(command.text) for command in section.commands) and reason_not_to_run(section) is None
]


@pytest.mark.wide
@pytest.mark.parametrize("name", RUN)
@pytest.mark.timeout(140)
def test_the_commands_of_a_section_run(name: str, folder: Path) -> None:
    shell = Shell(folder, stand_in_programs(folder), FASTER)
    try:
        write_files(SECTIONS[name], folder)
        for block in SECTIONS[name].blocks:
            if block.language == "python" and block.file is None and shell.server is not None:
                shell.run(Command(f"python -c {shlex.quote(block.text)}"))
            for command in block.commands():
                if not SETS_UP.match(command.text):
                    shell.run(command)
    finally:
        shell.close()


# -- the Python in the documents ---------------------------------------------------------------------------------------

PYTHON = [
    pytest.param(block.text, id=f"{section.document.name}:{block.line}")
    for section in SECTIONS.values()
    for block in section.blocks
    if block.language == "python"
]


@pytest.mark.parametrize("text", PYTHON)
def test_the_python_compiles_and_what_it_imports_is_there(text: str) -> None:
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def whole_programs() -> Iterator[object]:
    """Blocks that lack nothing, and are no file of a command; a server's clients run with its commands."""
    for section in SECTIONS.values():
        for block in section.blocks:
            whole = block.language == "python" and block.file is None and f"127.0.0.1:{PORT}" not in block.text
            if whole and not unbound_names(block.text):
                yield pytest.param(block.text, id=f"{section.document.name}:{block.line}")


@pytest.mark.slow
@pytest.mark.parametrize("text", list(whole_programs()))
def test_a_whole_program_runs(text: str, folder: Path) -> None:
    Shell(folder, stand_in_programs(folder), FASTER).run(Command(f"python -c {shlex.quote(text)}"))


# -- the units and the manifest of docs/restarts.md --------------------------------------------------------------------

BLOCKS = [block for section in SECTIONS.values() if section.document.name == "restarts.md" for block in section.blocks]
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
    page = (ROOT / "docs" / "restarts.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{spelled_flag(name)}` \| (\S+) \|", page, re.M)
    default = MAX_ENGINE_RESTARTS if name == "max_engine_restarts" else merge()[name]
    assert float(row) == default
