"""`ubatch serve --tensor-parallel-size 2` as a user runs it: overlap, a trace, a drain, and a dead follower."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_processes import MODEL, PATIENCE_S, PROMPTS, Server, metric, sick, stream_lines
from served import wait_until

from serving.cli import main

pytestmark = pytest.mark.server

TP = ("-tp", "2", "--enable-expert-parallel", "--enable-dbo", "--dbo-decode-token-threshold", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(MODEL, *TP, "--port", "0", "--profile-dir", str(tmp_path_factory.mktemp("profile")))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


@pytest.mark.slow
def test_it_says_who_is_who(server: Server) -> None:
    assert server.url
    assert "ranks=1 tensor_parallel_size=2" in server.text
    for rank in (0, 1):
        assert f"memory of rank {rank} (DP 0, TP {rank}): KV cache" in server.text
        assert server.wait_for(rf"engine rank={rank} pid=\d+ dp=0 tp={rank}")


@pytest.mark.slow
def test_its_steps_overlap_and_are_counted_once(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        one = client.completions.create(model=MODEL, prompt="def main(", max_tokens=5, temperature=0)
        assert one.choices[0].text.startswith("self")
        many = client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=8, temperature=0)
        assert many.choices[0].text.startswith(one.choices[0].text)
        for _ in range(2):  # no seed: both ranks sample the same nevertheless
            client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=8, temperature=1.0)
    assert metric(server, "ubatch:steps_total", mode="decode", outcome="engaged", engine="0") > 10
    tokens = sum(each.usage.completion_tokens for each in (one, many) if each.usage)
    assert metric(server, "vllm:generation_tokens_total") >= tokens
    wait_until(lambda: metric(server, "vllm:request_success_total") == 1 + 3 * len(PROMPTS), "all are counted")
    assert metric(server, "ubatch:steps_total", engine="1") == 0  # there is one data-parallel rank


@pytest.mark.slow
def test_a_trace_shows_both_processes(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = threading.Event()

    def keep_streaming() -> None:
        while not traced.is_set():
            stream_lines(server.url, 40, [], threading.Event())

    streams = [threading.Thread(target=keep_streaming) for _ in range(4)]
    for stream in streams:
        stream.start()
    try:
        assert main(["trace", "--url", server.url, "--seconds", "1", "--out", str(tmp_path / "trace")]) == 0
    finally:
        traced.set()
        for stream in streams:
            stream.join(PATIENCE_S)
    assert re.search(r"fact: [1-9]\d* of \d+ steps overlapped", capsys.readouterr().out)
    text = (tmp_path / "trace" / "trace.json").read_text()
    assert '"lane 1"' in text
    assert '"pid":1' in text.replace(" ", "")


@pytest.mark.slow
def test_sigterm_drains(server: Server) -> None:
    lines: list[str] = []
    began = threading.Event()
    stream = threading.Thread(target=stream_lines, args=(server.url, 100, lines, began))
    stream.start()
    assert began.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    stream.join(PATIENCE_S)
    assert "data: [DONE]" in lines[-2:]
    assert server.end() == 0
    assert "Traceback" not in server.text
    assert server.lines[-1].endswith("drained")


@pytest.mark.slow
def test_a_follower_that_dies_ends_the_server() -> None:
    server = Server(MODEL, *TP, "--port", "0")
    try:
        url = server.url
        lines: list[str] = []
        began = threading.Event()
        stream = threading.Thread(target=stream_lines, args=(url, 1000, lines, began))
        stream.start()
        assert began.wait(PATIENCE_S)
        os.kill(int(server.wait_for(r"engine rank=1 pid=(\d+)")), signal.SIGKILL)
        killed = time.monotonic()
        assert "rank 1 (DP 0, TP 1)" in sick(url)
        assert server.end() == 1
        assert time.monotonic() - killed < 30
        assert server.lines[-1] == "ubatch serve: rank 1 (DP 0, TP 1) was killed by SIGKILL."
        stream.join(PATIENCE_S)
        assert any('"error"' in line and "rank 1" in line for line in lines), lines[-3:]
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()
