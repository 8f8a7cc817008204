"""`ubatch serve` as a user runs it: one command, its clients, its signals, and engines that die."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forked import AsSpawned
from serve_processes import MODEL, PATIENCE_S, PROMPTS, Server, metric, sick, stream_lines
from served import wait_until

from serving.cli import main

pytestmark = pytest.mark.server

EP = ("--data-parallel-size", "2", "--enable-expert-parallel")
FLOAT32 = ("--dtype", "float32")  # `auto` runs products of both dtypes for seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ["--enable-dbo", "--config", "examples/dbo.yaml", "--dbo-decode-token-threshold", "2", "--port", "0"]
    server = Server(MODEL, *EP, *FLOAT32, *words, "--profile-dir", str(tmp_path_factory.mktemp("profile")))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


def test_it_says_what_it_has_when_it_is_ready(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    for rank in (0, 1):
        assert f"memory of rank {rank}: KV cache" in server.text
    overlap = server.wait_for(r"overlap ubatch_size.*")
    assert "decode_from_tokens=2 prefill_from_tokens=64 schedule=mlp_shared_overlap" in overlap
    assert "Traceback" not in server.text


def test_openai_client_and_overlapped_steps(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
        one = client.completions.create(model=MODEL, prompt="def main(", max_tokens=5, temperature=0)
        assert one.choices[0].text.startswith("self")
        many = client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=8, temperature=0)
    assert len(many.choices) == len(PROMPTS)
    assert many.choices[0].text.startswith(one.choices[0].text)
    assert metric(server, "ubatch:steps_total", mode="decode", outcome="engaged") > 0
    for engine in ("0", "1"):
        assert metric(server, "vllm:generation_tokens_total", engine=engine) > 0
    # An answer may be here before it has been counted.
    for name in ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count"):
        wait_until(lambda name=name: metric(server, name) == 1 + len(PROMPTS), name)  # type: ignore[misc]
    wait_until(lambda: metric(server, "vllm:num_requests_running") == 0, "nothing runs")


def test_a_profile_has_both_lanes(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert client.post("/start_profile").status_code == 200
        body = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        files = client.post("/stop_profile").json()["files"]
    assert len(files) == 2
    for file in files:
        text = Path(file).read_text()
        assert '"lane 0"' in text
        assert '"lane 1"' in text


def test_sigterm_drains_and_exits_with_zero(server: Server) -> None:
    lines: list[str] = []
    began = threading.Event()
    stream = threading.Thread(target=stream_lines, args=(server.url, 60, lines, began))
    stream.start()
    assert began.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    assert "requests=1" in server.wait_for(r"draining signal=SIGTERM requests=\d+")
    body = {"model": MODEL, "prompt": "def main(", "max_tokens": 1}
    try:
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 503
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 503
    except httpx.TransportError:  # it was quicker than we
        server.wait_for("drained")
    stream.join(PATIENCE_S)
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0
    assert "Traceback" not in server.text
    assert server.lines[-1].endswith("drained")


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_server() -> None:
    server = Server(MODEL, "--data-parallel-size", "2", "--port", "0")
    try:
        url = server.url
        pids = [int(server.wait_for(rf"engine rank={rank} pid=(\d+)")) for rank in (0, 1)]
        streams, all_lines = [], []
        for _ in range(2):  # one on each rank
            lines: list[str] = []
            began = threading.Event()
            stream = threading.Thread(target=stream_lines, args=(url, 1000, lines, began))
            stream.start()
            assert began.wait(PATIENCE_S)
            streams.append(stream)
            all_lines.append(lines)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        assert "rank 1" in sick(url)
        status = server.end()
        assert time.monotonic() - killed < 30
        assert status == 1
        assert server.lines[-1] == "ubatch serve: rank 1 was killed by SIGKILL."
        for stream, lines in zip(streams, all_lines, strict=True):
            stream.join(PATIENCE_S)
            assert any('"error"' in line and "rank 1" in line for line in lines), lines[-3:]
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


@pytest.mark.slow
def test_an_engine_that_hangs_ends_the_server() -> None:
    server = Server(MODEL, "--port", "0", "--timeout-s", "4")
    lines: list[str] = []
    began = threading.Event()
    stream = threading.Thread(target=stream_lines, args=(server.url, 1000, lines, began))
    stream.start()
    assert began.wait(PATIENCE_S)
    os.kill(int(server.wait_for(r"engine rank=0 pid=(\d+)")), signal.SIGSTOP)
    stopped = time.monotonic()
    assert "rank 0 hangs" in sick(server.url)
    assert time.monotonic() - stopped < 6
    stream.join(PATIENCE_S)
    assert any('"error"' in line and "rank 0 hangs" in line for line in lines), lines[-3:]
    assert server.end() == 1
    assert server.lines[-1] == "ubatch serve: rank 0 hangs: it has given no sign of life for 4 s (timeout_s)."


@pytest.mark.slow
def test_a_second_signal_does_not_wait() -> None:
    server = Server(MODEL, "--port", "0")
    lines: list[str] = []
    began = threading.Event()
    stream = threading.Thread(target=stream_lines, args=(server.url, 1000, lines, began))
    stream.start()
    assert began.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGINT)
    server.wait_for("draining signal=SIGINT requests=1")
    server.process.send_signal(signal.SIGINT)
    began_to_end = time.monotonic()
    assert server.end() == 128 + signal.SIGINT
    assert time.monotonic() - began_to_end < 5
    assert "Traceback" not in server.text
    stream.join(PATIENCE_S)
    assert '"finish_reason":"length"' not in "".join(lines)  # an error in the stream, or the connection cut


@pytest.mark.slow
def test_ctrl_c_while_starting_ends_the_ranks() -> None:
    server = Server(MODEL, *EP, "--port", "0")
    server.wait_for("starting model=")
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all of them
    assert server.end() == 128 + signal.SIGINT
    assert server.lines[-1].endswith("interrupted while starting signal=SIGINT")


def serve(*words: str) -> None:
    sys.exit(main(["serve", *words]))


def test_a_port_in_use_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = AsSpawned().Process(target=serve, args=(MODEL, *FLOAT32, "--port", str(port)))
        server.start()
        server.join(PATIENCE_S)
        assert server.exitcode == 1
    out, error = capfd.readouterr()
    assert error.startswith(f"ubatch serve: cannot listen on 127.0.0.1:{port}: Address already in use.")
    assert len((out + error).splitlines()) == 1
