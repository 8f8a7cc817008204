"""What goes over the wire comes back equal, errors come back as what they were; and what an engine reads from its
socket before a step. Nodes that were started with different settings say so, on both ends, and serve nothing together.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch.distributed as dist
import zmq
import zmq.asyncio
from engine_mains import secret_file, sleep_for_ever, tiny, tokens_of
from repository import TINY_MOE

from attention import KVCacheExhausted
from model_runner import CheckpointError, FinishReason, RequestError, SamplingParams, TensorMissing, TokenLogprobs
from ranks import free_port
from serving.engine import EngineClient, EngineOptions, run_node
from serving.engine.kept import InStep
from serving.engine.options import RestartLimits
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire import messages as wire
from serving.engine.wire.agreement import describe_shape, require_same_shape
from serving.engine.wire.link import EngineLink
from serving.engine.wire.rendezvous import Run, check_node, claim_node, join_run, post_node
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from serving.scheduler import SchedulerConfig
from ubatch import ConfigError, UBatchConfig

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    seed=2**62,
    stop_token_ids=(1, 2),
    logit_bias=((5, -1.5),),
    logprobs=2,
    frequency_penalty=0.1,
    max_tokens=9,
    min_tokens=3,
    allowed_token_ids=(4, 1, 7),
    bad_token_sequences=((8,), (7, 4)),
)
LOGPROBS = TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, -1.0)))


@pytest.mark.parametrize(
    "message",
    [
        wire.Add(RequestInput("a", [1, 2, 3], PARAMS, priority=-1), 7),
        *(wire.Abort("a"), wire.Wake(3), wire.StartProfile(), wire.StopProfile("/somewhere"), wire.Shutdown()),
        *(wire.Ready(1, 2048, 100, "KV cache"), wire.Alive(1, 900.0), wire.Finished(0, "42"), wire.NodeAlive(1)),
        wire.Outputs(
            0,
            12,
            [
                RequestOutput("a", [1, 2], logprobs=[LOGPROBS, LOGPROBS], num_cached_tokens=16),
                RequestOutput("b", [], [], [None, LOGPROBS], finish_reason=FinishReason.STOP, stop_token=2),
            ],
            EngineStatistics(num_running=1, kv_usage=0.25, steps={"decode/engaged": 3}),
        ),
        *(wire.Refused(0, "a", "RequestError", "no"), wire.Refused(0, "a", "RequestError", "no", "min_tokens")),
        wire.Failed(1, "rank 0 died", "UBatchError", "PeerFailed", "Traceback", echo=True),
        *(
            wire.ProfileWritten(0, "/somewhere", None),
            wire.NodeFound(1, {2: wire.RankFound(InStep(True, ("a",)), "S"), 3: wire.RankFound()}),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back(message: wire.ToEngine | wire.FromEngine) -> None:
    to_engine = isinstance(message, get_args(wire.ToEngine))
    assert (wire.decode_to_engine if to_engine else wire.decode_from_engine)(wire.encode(message)) == message


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(b"\x00hello")
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.encode(wire.NodeAlive(1)))
    fields = msgspec.msgpack.decode(wire.encode(wire.Add(RequestInput("a", [1], SamplingParams()), 1)))
    fields[1]["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match=r"top_p must be above 0 and at most 1, not 7\.0"):
        wire.decode_to_engine(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("no", param="min_tokens"), RequestError),
        (KVCacheExhausted("no"), KVCacheExhausted),
        (ConfigError("no"), ConfigError),
        (TensorMissing("w", "no"), CheckpointError),
        (ZeroDivisionError("no"), type(None)),  # of others: it does not become ours
    ],
)
def test_errors_keep_their_kind(error: Exception, kind: type[Exception]) -> None:
    made = wire.make_error(wire.error_kind(error), str(error), "min_tokens")
    assert type(made) is kind
    assert str(made) == ("None" if made is None else "no")
    assert getattr(made, "param", None) == getattr(error, "param", None)


def test_speculation_runs_in_the_plain_loop() -> None:
    speculating = SpeculationConfig(Algorithm.NGRAM, 3)
    assert EngineOptions(Path("model"), overlap_schedule=True).overlaps_schedule
    assert EngineOptions(Path("model"), device="cuda").overlaps_schedule
    assert not EngineOptions(Path("model")).overlaps_schedule
    assert not EngineOptions(Path("model"), speculation=speculating, overlap_schedule=True).overlaps_schedule


@contextmanager
def connected(folder: Path) -> Iterator[tuple[Callable[..., object], EngineLink]]:
    """What sends to an engine all at once, and the engine's end."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as client:
        client.bind(f"ipc://{folder}/client")
        with closing(EngineLink(f"ipc://{folder}/client", "rank-0")) as link:
            link.send(wire.Abort("hello"))  # type: ignore[arg-type]
            client.recv_multipart()
            yield lambda *messages: client.send_multipart([b"rank-0", *map(wire.encode, messages)]), link


def slowly(messages: Iterator[wire.ToEngine]) -> list[str]:
    """Take messages in, at a millisecond each."""
    taken = []
    for message in messages:
        assert isinstance(message, wire.Abort)
        taken.append(message.request_id)
        time.sleep(0.001)
    return taken


@pytest.mark.long
def test_a_flood_of_messages_is_taken_in_over_several_steps(tmp_path: Path) -> None:
    """Those that run must not wait until all of a large body's requests are read."""
    names = [str(number) for number in range(300)]
    with connected(tmp_path) as (send, link):
        for name in names:
            send(wire.Abort(name))
        parts: list[list[str]] = []
        while sum(map(len, parts)) < 300:
            parts.append(slowly(link.receive(5.0)))
        assert 2 < len(parts) < 300
        assert [name for part in parts for name in part] == names
        assert list(link.receive()) == []
        for name in names:
            send(wire.Abort(name))
        time.sleep(1.0)  # a long step
        assert len(slowly(link.receive())) > max(map(len, parts)), "what takes no longer than the step does not wait"


def test_what_was_sent_together_is_taken_together_where_no_step_waits(tmp_path: Path) -> None:
    """So that all prompts of an offline run are in the first step, and ranks that share experts begin alike."""
    with connected(tmp_path) as (send, link):
        taken: list[int] = []
        for wait_s in (5.0, 0.0):
            send(*(wire.Abort(str(number)) for number in range(30)))
            time.sleep(0.05)
            link._received_at = time.monotonic()
            taken.append(len(slowly(link.receive(wait_s))))
        assert taken[0] == 30
        assert 0 < taken[1] < 30, "a step does not wait for all of them"
        assert taken[1] + len(slowly(link.receive(1.0))) == 30


async def test_a_request_that_is_refused_while_it_runs_is_aborted() -> None:
    """Its rank goes on with it otherwise, where only an output was too long for node 0."""
    client = EngineClient(tiny())
    client._runs.serves = True
    address = f"tcp://127.0.0.1:{client._runs.run.socket.bind_to_random_port('tcp://127.0.0.1')}"
    receiving = asyncio.create_task(client._runs.run.receive())
    context = zmq.asyncio.Context()
    rank = context.socket(zmq.DEALER)
    rank.setsockopt_string(zmq.IDENTITY, "rank-0")
    rank.connect(address)
    await rank.send(wire.encode(wire.Refused(0, "nobody", "RequestError", "no")))
    await asyncio.sleep(0.3)
    asked = asyncio.create_task(tokens_of(client, "a", [1, 2], SamplingParams()))
    assert isinstance(wire.decode_to_engine(await asyncio.wait_for(rank.recv(), 10)), wire.Add)
    await rank.send(wire.encode(wire.Refused(0, "a", "RequestError", "too long")))
    with pytest.raises(RequestError, match="too long"):
        await asked
    assert wire.decode_to_engine(await asyncio.wait_for(rank.recv(), 10)) == wire.Abort("a")
    assert client.num_outstanding == 0
    receiving.cancel()
    await client._end(0.0)
    rank.close(linger=0)
    context.term()


# -- nodes that differ -------------------------------------------------------------------------------------------------


def two_nodes(node_rank: int = 0, **options: Any) -> EngineOptions:
    return tiny(options.pop("ranks", 2), node_rank=node_rank, **{"nnodes": 2, "master_port": 1, **options})


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": (
        {"ranks": 4, "nnodes": 4},
        "--data-parallel-size is 4 on node 1 and 2 on node 0; --nnodes is 4 on node 1",
    ),
    "ranks": ({"ranks": 4}, "--data-parallel-size is 4 on node 1 and 2 on node 0"),
    "tensor parallel": ({"tensor_parallel_size": 2}, "--tensor-parallel-size is 2 on node 1 and 1 on node 0"),
    "experts": ({"expert_parallel": True}, "--enable-expert-parallel is true on node 1 and false on node 0"),
    "blocks": ({"block_size": 32}, "--block-size is 32 on node 1 and 16 on node 0"),
    "tokens": (
        {"scheduler": SchedulerConfig(max_model_len=256, max_num_seqs=16)},
        "--max-model-len is 256 on node 1 and 512 on node 0",
    ),
    "overlap": (
        {"dbo": UBatchConfig(dbo_decode_token_threshold=5, dbo_prefill_token_threshold=8)},
        "--dbo-decode-token-threshold is 5 on node 1 and 4 on node 0",
    ),
    "speculation": (
        {"speculation": SpeculationConfig(Algorithm.NGRAM, 2)},
        '--speculative-algorithm is "ngram" on node 1 and not set',
    ),
    "a job": ({"job": {"max_rounds": 3}}, "--max-rounds is 3 on node 1 and not set"),
}


@pytest.mark.parametrize(("other", "why"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_settings_are_an_error_on_both_ends(other: dict[str, Any], why: str) -> None:
    store = dist.HashStore()
    Run.open(store, None).post_client_address("tcp://127.0.0.1:5", two_nodes())
    post_node(store, two_nodes(1, **other))
    with pytest.raises(ConfigError, match=f"^node 1 and node 0 cannot work together: .*{why}"):
        join_run(store, two_nodes(1, **other))
    with pytest.raises(
        ConfigError, match=r"^node 0 and node 1 cannot work together: .* Start every node with the same"
    ):
        check_node(store, None, two_nodes(), 1)


def test_what_is_a_machines_own_may_differ(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(TINY_MOE, copy)
    there = replace(
        two_nodes(1, master_addr="127.0.0.1", kv_cache_memory=1 << 20, log_level="debug", profile_folder=tmp_path),
        model=copy,
        restarts=RestartLimits(resume_timeout_s=1.0),
    )
    require_same_shape(two_nodes(), describe_shape(there), 1)
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"vocab_size": 7}))
    with pytest.raises(ConfigError, match=r"config\.json of MODEL \(SHA-256\) is \"[0-9a-f]{16}\" on node 0"):
        require_same_shape(two_nodes(), describe_shape(there), 1)
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"unreadable \(No such file"):
        require_same_shape(two_nodes(), describe_shape(there), 1)


@pytest.mark.parametrize("text", ["", "here", "[]", "{"])
def test_another_version_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="Install the same version on every node"):
        require_same_shape(two_nodes(), text, 1)


@pytest.mark.slow
def test_another_process_says_the_same_of_the_same_settings() -> None:
    """Whatever order its sets have."""
    script = "from serving.engine.wire.agreement import *; from engine_mains import tiny; print(describe_shape(tiny()))"
    paths = os.pathsep.join(sys.path)
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in "12"
    }
    assert said == {describe_shape(tiny())}


def test_a_second_node_of_the_same_rank_is_refused() -> None:
    run = Run.open(dist.HashStore(), None)
    claim_node(run, 1)
    claim_node(run, 2)
    with pytest.raises(ConfigError, match="a node with --node-rank 1 has joined node 0's run already"):
        claim_node(run, 1)


@pytest.mark.parametrize(
    ("stranger", "secrets", "why"),
    [
        ({"ranks": 4, "nnodes": 4, "node_rank": 3}, (), "--nnodes is 4 on node 3 and 2 on node 0"),
        (
            {"node_rank": 1},
            ("0123456789abcdef" * 4, "fedcba9876543210" * 4),
            "^node {0} and node {1} do not have the same cluster secret.* copy of one file",
        ),
    ],
    ids=["settings", "secret"],
)
async def test_nodes_that_do_not_fit_both_say_so_and_end_at_once(
    stranger: dict[str, Any], secrets: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    common = {"master_port": free_port()}
    files = [{"cluster_secret_file": secret_file(tmp_path / text[:4], text)} for text in secrets] or [{}, {}]
    other = two_nodes(**common, **files[1], **stranger)
    node = asyncio.create_task(asyncio.to_thread(run_node, other, engine_main=sleep_for_ever))
    start = EngineClient.start(two_nodes(**common, **files[0]), engine_main=sleep_for_ever)
    errors = await asyncio.wait_for(asyncio.gather(start, node, return_exceptions=True), 60)
    for here, error in enumerate(errors):
        assert isinstance(error, ConfigError)
        assert re.search(why.format(here, 1 - here), str(error))
        assert not any(secret in str(error) for secret in secrets)


OF_RANK_9 = [
    *(wire.Ready(9, 1, 1, ""), wire.Alive(9, 0.0), wire.Outputs(9, 0, (), EngineStatistics())),
    *(wire.Refused(9, "a", "RequestError", "no"), wire.Failed(9, "is no more"), wire.Finished(9, "")),
    wire.ProfileWritten(9, "", None),
    *(wire.Ready(1, 1, 1, ""), wire.Finished(0, "")),  # in another's name
]


async def test_a_message_of_no_rank_of_this_run_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Ready is who has all its ranks, and not who has as many."""
    caplog.set_level(logging.WARNING, "serving")
    client = EngineClient(tiny(2))
    address = f"tcp://127.0.0.1:{client._runs.run.socket.bind_to_random_port('tcp://127.0.0.1')}"
    receiving = asyncio.create_task(client._runs.run.receive())
    context = zmq.Context()

    def send(name: str, message: Any) -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt_string(zmq.IDENTITY, name)
            socket.connect(address)
            socket.send(wire.encode(message))

    send("rank-0", wire.Ready(0, 1, 1, ""))
    for message in OF_RANK_9:
        send("rank-9", message)
    send("node-9", wire.NodeAlive(9))
    await asyncio.sleep(0.5)
    assert not client._runs.run.all_ready.done()
    assert not client._finished.done()
    assert not receiving.done()
    assert client._runs.run.liveness._nodes == {}
    send("rank-1", wire.Ready(1, 1, 1, ""))
    await asyncio.wait_for(client._runs.run.all_ready, 10)
    receiving.cancel()
    await client._end(0.0)
    context.term()
    texts = [each.getMessage() for each in caplog.records]
    assert len([text for text in texts if text.startswith("a message of no rank or node of this run")]) == 1
