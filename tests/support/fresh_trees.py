"""Copies of the tree, and environments that know nothing of this one but borrow what `make setup` downloads."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from repository import ROOT

WRITTEN = (".git", ".venv", ".*cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "demo")


def run(words: list[str], folder: Path) -> str:
    """What a command prints, which must end well."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(words, cwd=folder, env=outside, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def copy_tree(folder: Path) -> Path:
    """The repository without what `make` wrote."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*WRITTEN))
    return folder


def make_environment(environment: Path, *package: str) -> tuple[Path, Path]:
    """An environment in which one package is installed; returns its Python and its folder of packages."""
    folder, python = environment.parent, environment / "bin" / "python"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *offline, *package], folder)
    return python, site
