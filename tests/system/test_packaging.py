"""What is released: a source distribution from which the tests run, and a wheel that needs no repository.

And the README's commands, as a new user types them: in a copy of the tree, in a shell with a plain PATH.
"""

import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_shell import Shell
from documents import Command, sections
from fresh_trees import copy_tree, make_environment, run
from repository import ROOT

from ubatch import __version__

PACKAGES = ("ubatch", "moe", "attention", "model_runner", "serving")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without what `make` wrote: building writes next to the sources."""
    return copy_tree(tmp_path_factory.mktemp("source") / "ubatch")


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source distribution holds."""
    folder = tmp_path_factory.mktemp("sdist")
    before = files_of(source)
    build = f"import setuptools.build_meta as build; build.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], source)
    with tarfile.open(folder / f"ubatch-{__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    found = folder / f"ubatch-{__version__}"
    assert before - files_of(found) - {".gitignore"} == set()
    return found


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_the_tests_run_from_the_source_distribution(unpacked: Path) -> None:
    words = ["tests/ubatch/schedules", "tests/serving/options/test_vllm_flags.py"]
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *words[1:]], unpacked)
    collected = run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words], unpacked
    )
    assert len(collected.splitlines()) > 100


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_a_wheel_needs_no_repository(unpacked: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows our dependencies but not the packages that are installed there."""
    build = f"import setuptools.build_meta as build; build.build_wheel({str(tmp_path)!r})"
    run([sys.executable, "-c", build], unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    fresh = tmp_path / "venv"
    python, site = make_environment(fresh, str(wheel))
    assert run([str(fresh / "bin" / "ubatch"), "--version"], tmp_path) == f"ubatch {__version__}\n"
    where = f"import {', '.join(PACKAGES)}; print(*(each.__file__ for each in ({', '.join(PACKAGES)})), sep='\\n')"
    for line in run([str(python), "-c", where], tmp_path).splitlines():
        assert Path(line).is_relative_to(site)
        assert (Path(line).parent / "py.typed").is_file()
    kernels = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.c")]
    assert len(kernels) > 4
    data = (
        "ubatch/kernels/c_vectors.h",
        "ubatch/kernels/c_tiles.h",
        "ubatch/trace/page.html",
        "serving/options/flags/foreign.yaml",
        "serving/workbench/planning/constants.yaml",
    )
    for name in (*data, *kernels):
        assert (site / name).is_file()
    assert "serve" in run([str(fresh / "bin" / "ubatch"), "--help"], tmp_path)


def test_extras_are_in_the_table() -> None:
    """docs/install.md names every extra, and only those."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in extras:
        assert f"| `{extra}` |" in page


# -- the README's commands ---------------------------------------------------------------------------------------------

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
