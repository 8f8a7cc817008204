"""A shell for the commands of documents: it runs them, and compares what they print with what is shown."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from documents import Command
from repository import ROOT

from serving.ranks import free_port

PORT = "8000"
"""The documents' port; tests take a free one."""


def stand_in_programs(folder: Path) -> dict[str, str]:
    """An environment whose `ubatch`, `python` and `torchrun` are of this tree and interpreter, in `folder`/bin."""
    programs = folder / "bin"
    programs.mkdir()
    for name, module in (("ubatch", "-m serving.cli"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Shell:
    """Runs commands, one after the other, in a folder of its own.

    Args:
        folder: where they run.
        environment: their environment; `source` changes it.
        faster: part of a command -> flags that make it quick.
        waits: wait until a server answers; else the next command comes at once, as if it was pasted.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], faster: Mapping[str, str], *, waits: bool = True
    ) -> None:
        self.folder, self.environment, self.faster, self.waits = folder, dict(environment), faster, waits
        self.port = str(free_port())
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, command: Command) -> None:
        """Run it to its end, but a server only until it answers; compare what it prints with what is shown."""
        text = command.text.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{self.port}")
        if text.startswith("source "):
            self.source(text)
            return
        if text.startswith("ubatch serve"):
            self.serve(text.removesuffix("&"))
            return
        if text.startswith("ubatch bench serve") and "--base-url" not in text:
            text += f" --base-url http://127.0.0.1:{self.port}"
        faster = [f" {flags}" for begin, flags in self.faster.items() if begin in text]
        done = subprocess.run(
            ["bash", "-c", text + "".join(faster)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=130,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        lines = (done.stdout + done.stderr).splitlines()
        for shown in () if faster and text.startswith("ubatch tune") else command.shown:  # a quick one has other cells
            found = any(pattern_of(shown).fullmatch(line.strip()) for line in lines)
            assert found, f"{text}\nlacks {shown!r} in\n{lines}"

    def source(self, text: str) -> None:
        """Take over the environment that a script leaves."""
        words = ["bash", "-c", f"{text} && env --null"]
        left = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=10)
        assert left.returncode == 0, f"{text}\n{left.stderr}"
        self.environment = dict(entry.split("=", 1) for entry in left.stdout.split("\0") if entry)

    def serve(self, text: str) -> None:
        """Start a server, and wait until it answers, if this shell waits."""
        self.close()
        self.server = subprocess.Popen(
            shlex.split(f"ubatch {text.removeprefix('ubatch ')} --port {self.port}"),
            cwd=self.folder,
            env=self.environment,
            executable=shutil.which("ubatch", path=self.environment["PATH"]),
        )
        if not self.waits:
            return
        deadline = time.monotonic() + 110
        while time.monotonic() < deadline and self.server.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        pytest.fail(f"{text}: no server within 110 s")

    def close(self) -> None:
        """End the server, if there is one: it must drain and exit with 0."""
        server, self.server = self.server, None
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()


def pattern_of(shown: str) -> re.Pattern[str]:
    """What a line may look like: `...` is anything, a number any number, but nought only nought."""
    parts = re.split(r"(\.\.\.|\d[\d.,]*(?:e[-+]\d+)?)", shown.strip())
    return re.compile("".join(part_pattern(part) for part in parts))


def part_pattern(part: str) -> str:
    if part == "...":
        return ".*"
    if re.fullmatch(r"0", part):
        return "0"
    if re.fullmatch(r"\d[\d.,]*(?:e[-+]\d+)?", part):
        return r"(?!0(?![\d.]))\d[\d.,]*(?:e[-+]\d+)?"
    return re.sub(r"(\\?\s)+", r"\\s+", re.escape(part))
