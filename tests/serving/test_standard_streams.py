"""Commands whose standard streams are closed, full, or read by nobody: no traceback, and the right status."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from repository import ROOT
from served import wait_until

from ranks import free_port

COMMAND = f"exec {sys.executable} -m serving.cli"

pytestmark = pytest.mark.long


def run(words: str, redirected: str, out: Path) -> tuple[int, str]:
    """The status of a command, and all that it wrote into a file."""
    script = f'exec > "{out}" 2>&1; {COMMAND} {words} {redirected}'
    status = subprocess.run(["bash", "-c", script], cwd=ROOT, timeout=100, check=False).returncode
    return status, out.read_text()


FULL = "ubatch: cannot write to standard output: No space left on device. Make room there, or send it elsewhere.\n"
CLOSED = "ubatch: standard output is closed; send it to a file, or to /dev/null.\n"


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "redirected", "status", "said"),
    [
        ("--version", ">/dev/full", 1, FULL),
        ("--version", ">&-", 1, CLOSED),
        ("serve --help", ">/dev/full", 1, FULL),  # longer than a buffer: `print` fails, not the last flush
        ("--version", ">/dev/full 2>/dev/full", 1, ""),
        ("--version", "<&- >&- 2>&-", 1, ""),
        ("serve", ">/dev/full 2>/dev/full", 2, ""),
        ("serve", ">&- 2>&-", 2, ""),
        ("serve", "2>&-", 2, ""),  # and the message is not written to standard output instead
        ("no-such-command", "2>/dev/full", 2, ""),
    ],
)
def test_the_status_is_right_and_nothing_else_is_said(
    words: str, redirected: str, status: int, said: str, tmp_path: Path
) -> None:
    assert run(words, redirected, tmp_path / "out") == (status, said)


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2> >(head -1)"])
def test_what_is_asked_for_is_written_though_messages_are_lost(redirected: str, tmp_path: Path) -> None:
    status, written = run("--version", redirected, tmp_path / "out")
    assert status == 0
    assert written.startswith("ubatch ")


@pytest.mark.wide
@pytest.mark.sample(3)  # each starts a server
@pytest.mark.parametrize("redirected", ["<&- >&- 2>&-", "2>/dev/full", "2> >(head -1 >/dev/null)"])
def test_a_server_that_nobody_hears_serves_and_drains(redirected: str) -> None:
    port = free_port()
    words = f"serve examples/models/tiny-moe --device cpu --dtype float32 --port {port}"
    with subprocess.Popen(["bash", "-c", f"{COMMAND} {words} {redirected}"], cwd=ROOT) as server:
        try:
            wait_until(lambda: _is_well(port) or server.poll() is not None, "the server is ready")
            body = {"prompt": "a", "max_tokens": 2}
            url = f"http://127.0.0.1:{port}/v1/completions"
            assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def _is_well(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
