"""Nodes that were started with different settings say so, on both ends, and serve nothing together."""

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq
from engine_mains import secret_file, sleep_for_ever, tiny
from repository import TINY_MOE

from ranks import free_port
from serving.engine import EngineClient, EngineOptions, run_node
from serving.engine.options import RestartLimits
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire import messages as wire
from serving.engine.wire.agreement import describe_shape, require_same_shape
from serving.engine.wire.rendezvous import Run, check_node, claim_node, join_run, post_node
from serving.requests import EngineStatistics
from serving.scheduler import SchedulerConfig
from ubatch import ConfigError, UBatchConfig


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
