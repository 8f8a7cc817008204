"""`ubatch serve` as a user runs it: one command, its clients, its signals, and engines that die.

Two ranks share the experts, data-parallel or tensor-parallel.
"""

import json
import os
import re
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
from serve_processes import MODEL, PATIENCE_S, PROMPTS, Server, Stream, metric, running, sick
from served import wait_until

from serving.cli import main

pytestmark = pytest.mark.server

FLOAT32 = ("--dtype", "float32")  # `auto` runs products of both dtypes for seconds
EP = ("--enable-expert-parallel", *FLOAT32, "--port", "0")
DP, TP = ("--data-parallel-size", "2", *EP), ("-tp", "2", *EP)
OVERLAP = ("--enable-dbo", "--config", "examples/dbo.yaml", "--dbo-decode-token-threshold", "2")
NAMES = ("--served-model-name", MODEL, "--served-model-name", "alias")


@pytest.fixture(scope="module", params=[DP, pytest.param(TP, marks=pytest.mark.slow)], ids=["dp", "tp"])
def ways(request: pytest.FixtureRequest) -> tuple[str, ...]:
    words: tuple[str, ...] = request.param
    return words


@pytest.fixture(scope="module")
def server(ways: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(MODEL, *ways, *OVERLAP, *NAMES, "--profile-dir", str(tmp_path_factory.mktemp("profile"))) as server:
        yield server


@pytest.mark.wide
def test_it_says_what_it_has_when_it_is_ready(server: Server, ways: tuple[str, ...]) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert ("ranks=1 tensor_parallel_size=2" if ways == TP else "ranks=2") in server.text
    for rank in (0, 1):
        name, place = (f" (DP 0, TP {rank})", f" dp=0 tp={rank}") if ways == TP else ("", "")
        assert f"memory of rank {rank}{name}: KV cache" in server.text
        assert server.wait_for(rf"engine rank={rank} pid=\d+{place}\n")
    overlap = server.wait_for(r"overlap ubatch_size.*")
    assert "decode_from_tokens=2 prefill_from_tokens=64 schedule=mlp_shared_overlap" in overlap
    assert "Traceback" not in server.text


def test_openai_client_and_overlapped_steps(server: Server, ways: tuple[str, ...]) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        assert [model.id for model in client.models.list().data] == [MODEL, "alias"]
        one = client.completions.create(model=MODEL, prompt="def main(", max_tokens=5, temperature=0)
        assert one.choices[0].text.startswith("self")
        many = client.completions.create(model="alias", prompt=PROMPTS, max_tokens=8, temperature=0)
        if ways == TP:  # no seed: both ranks sample the same nevertheless
            client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=8, temperature=1.0)
    assert (many.model, len(many.choices)) == ("alias", len(PROMPTS))
    assert many.choices[0].text.startswith(one.choices[0].text)
    ended = 1 + len(PROMPTS) * (2 if ways == TP else 1)
    # An answer may be here before it has been counted.
    for name in ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count"):
        wait_until(lambda name=name: metric(server, name) == ended, name)  # type: ignore[misc]
    wait_until(lambda: metric(server, "vllm:num_requests_running") == 0, "nothing runs")
    assert metric(server, "ubatch:steps_total", mode="decode", outcome="engaged", engine="0", model_name=MODEL) > 0
    for engine in ("0", "1"):  # of tensor-parallel ranks the first one counts
        generated = metric(server, "vllm:generation_tokens_total", engine=engine)
        assert (generated > 0) == (ways == DP or engine == "0")


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


@pytest.mark.slow
def test_a_trace_shows_both_processes(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = threading.Event()

    def keep_streaming() -> None:
        while not traced.is_set():
            Stream(server.url, 40).to_its_end()

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


@pytest.mark.wide
def test_sigterm_drains_and_exits_with_zero(server: Server) -> None:
    stream = Stream(server.url, 60)
    server.process.send_signal(signal.SIGTERM)
    assert "requests=1" in server.wait_for(r"draining signal=SIGTERM requests=\d+")
    body = {"model": MODEL, "prompt": "def main(", "max_tokens": 1}
    try:
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 503
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 503
    except httpx.TransportError:  # it was quicker than we
        server.wait_for("drained")
    lines = stream.to_its_end()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0
    assert "Traceback" not in server.text
    assert server.lines[-1].endswith("drained")


@pytest.mark.slow
@pytest.mark.parametrize("words", [DP, TP], ids=["dp", "tp"])
def test_an_engine_that_dies_is_started_again(words: tuple[str, ...]) -> None:
    with running(MODEL, *words) as server:
        pid = int(server.wait_for(r"engine rank=1 pid=(\d+)"))
        streams = [Stream(server.url, 1000) for _ in range(2)]
        os.kill(pid, signal.SIGKILL)
        server.wait_for(r"engine failed rank=1 .* was killed by SIGKILL")
        assert httpx.get(f"{server.url}/live", timeout=PATIENCE_S).status_code == 200
        paused = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
        assert (paused.status_code, paused.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(paused.headers["retry-after"]) >= 1
        server.wait_for(r"engines serve again seconds=[\d.]+")
        assert all(map(is_whole, streams))
        assert metric(server, "ubatch:engine_restarts_total", reason="killed") == 1
        assert metric(server, "ubatch:requests_resumed_total") == 2
        stream = Stream(server.url, 1000)
        os.kill(int(re.findall(r"engine rank=0 pid=(\d+)", server.text)[-1]), signal.SIGKILL)
        server.wait_for(r"engine failed rank=0 .* was killed by SIGKILL")
        server.process.send_signal(signal.SIGTERM)
        assert "requests=1" in server.wait_for(r"draining signal=SIGTERM requests=\d+")
        assert is_whole(stream)
        assert server.end() == 0


def is_whole(stream: Stream) -> bool:
    """Whether it has come to its end by its length."""
    *lines, last = [line for line in stream.to_its_end() if line.startswith("data: ")]
    end = json.loads(lines[-1].removeprefix("data: "))["choices"][0]["finish_reason"]
    return (last, end) == ("data: [DONE]", "length")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rank"), [(("--data-parallel-size", "2", "--port", "0"), "rank 1"), (TP, "rank 1 (DP 0, TP 1)")]
)
def test_an_engine_that_dies_ends_a_server_without_restarts(words: tuple[str, ...], rank: str) -> None:
    with running(MODEL, *words, "--max-engine-restarts", "0") as server:
        pid = int(server.wait_for(r"engine rank=1 pid=(\d+)"))
        streams = [Stream(server.url, 1000) for _ in range(2)]  # one on each rank
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert rank in sick(server.url)
        assert server.end() == 1
        assert time.monotonic() - killed < 30
        assert server.lines[-1] == f"ubatch serve: {rank} was killed by SIGKILL."
        assert all(stream.has_error("rank 1") for stream in streams)


@pytest.mark.slow
def test_an_engine_that_hangs_ends_a_server_without_restarts() -> None:
    with running(MODEL, "--port", "0", "--timeout-s", "4", "--max-engine-restarts", "0") as server:
        stream = Stream(server.url, 1000)
        os.kill(int(server.wait_for(r"engine rank=0 pid=(\d+)")), signal.SIGSTOP)
        stopped = time.monotonic()
        assert "rank 0 hangs" in sick(server.url)
        assert time.monotonic() - stopped < 6
        assert stream.has_error("rank 0 hangs")
        assert server.end() == 1
        said = "rank 0 hangs: it has given no sign of life for 4 s (timeout_s)."
        assert server.lines[-1] == f"ubatch serve: {said}"


@pytest.mark.slow
def test_a_second_signal_does_not_wait() -> None:
    with running(MODEL, "--port", "0") as server:
        stream = Stream(server.url, 1000)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("draining signal=SIGINT requests=1")
        server.process.send_signal(signal.SIGINT)
        began_to_end = time.monotonic()
        assert server.end() == 128 + signal.SIGINT
        assert time.monotonic() - began_to_end < 5
        assert "Traceback" not in server.text
        # An error in the stream, or the connection cut.
        assert '"finish_reason":"length"' not in "".join(stream.to_its_end())


@pytest.mark.slow
def test_ctrl_c_while_starting_ends_the_ranks() -> None:
    with running(MODEL, *DP) as server:
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
