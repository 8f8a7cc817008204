"""The README's commands, as a new user types them: in a copy of the tree, in a shell with a plain PATH."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_shell import Shell
from documents import Command, sections
from fresh_trees import copy_tree, make_environment
from repository import ROOT

COMMANDS = [command for section in sections() if section.document.name == "README.md" for command in section.commands]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, set up as by `make setup`; what that downloads, such as torch, is borrowed from this interpreter."""
    folder = copy_tree(tmp_path_factory.mktemp("clone") / "ubatch")
    environment = folder / ".venv"
    python, _ = make_environment(environment, "--no-build-isolation", "--editable", ".")
    torchrun = environment / "bin" / "torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    for stamp in (".installed", ".installed-test"):
        (environment / stamp).touch()
    return folder


@pytest.fixture(scope="module")
def shell(clone: Path) -> Iterator[Shell]:
    """One shell for all commands of this file; it knows nothing of this environment."""
    shell = Shell(clone, {"PATH": "/usr/bin:/bin", "HOME": str(clone.parent)}, {}, waits=False)
    yield shell
    shell.close()


@pytest.mark.slow
def test_before_the_readme_says_how_there_is_no_such_command(shell: Shell) -> None:
    with pytest.raises(AssertionError, match="ubatch: command not found"):
        shell.run(Command("ubatch --version"))


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:40])
def test_every_command_of_the_readme_runs_as_printed(command: Command, shell: Shell) -> None:
    """From top to bottom: run the whole file, two to three minutes on 2 cores. Of `make test` only the plan is run, and
    the server gets a free port."""
    shell.run(Command("make --dry-run test") if command.text == "make test" else command)


@pytest.mark.slow
def test_the_commands_were_those_of_the_clone(shell: Shell, clone: Path) -> None:
    assert [command.text for command in COMMANDS[:3]] == ["make demo", "make test", "source .venv/bin/activate"]
    shell.run(Command("which ubatch", (str(clone / ".venv" / "bin" / "ubatch"),)))
    shell.run(Command("python -c 'import serving; print(serving.__file__)'", (str(clone / "serving" / "__init__.py"),)))
    for written in ("demo/trace.html", "demo/trace.json", "dbo.yaml", "dbo.html"):
        assert (clone / written).is_file()


def test_the_set_up_ends_with_the_command_that_comes_next() -> None:
    """`make setup` says it; the demo does at its end (`test_examples.py`)."""
    assert planned("setup").splitlines()[-1].startswith("echo 'source .venv/bin/activate ")
    assert "activate" not in planned("lint")


def planned(target: str) -> str:
    """What make would run, also if it is make that runs the tests."""
    command = ["make", "--no-print-directory", "--dry-run", "--file", str(ROOT / "Makefile"), target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
