"""Servers of `ubatch bench peers`: `ubatch serve` and `vllm serve` on free ports, and a load on one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.workbench.bench.peers.process import Arm
from serving.workbench.bench.peers.results import Visit
from serving.workbench.bench.server.figures import figures_of
from serving.workbench.bench.server.process import UBATCH, ServerProcess, running_server
from serving.workbench.bench.server.requests import RequestFailed, Server, greedy_tasks, send_and_check

_VLLM = (
    "import importlib.metadata, sys, vllm; version = importlib.metadata.version; "
    "importlib.metadata.version = lambda name: vllm.__version__ if name == 'vllm' else version(name); "
    "from vllm.entrypoints.cli.main import main; sys.exit(main())"
)
"""The `vllm` command, which asks for the version of the package `vllm`; the package for CPUs is called otherwise."""


@contextmanager
def running_arm(
    arm: Arm, model: Path, *, max_model_len: int, max_num_seqs: int, timeout_s: float
) -> Iterator[ServerProcess]:
    """The engine's server, without prefix cache, as every visit sends the same prompts. Raises ServerFailed."""
    flags = ["--host", "127.0.0.1", "--dtype", arm.dtype, "--no-enable-prefix-caching"]
    flags += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    program: Sequence[str] = UBATCH
    if arm.engine == "vllm":
        program = (*arm.interpreter(), "-c", _VLLM)
        flags.append("--disable-uvicorn-access-log")  # ours has none unless asked for
    environment = arm.variables()
    with running_server(model, flags, environment=environment, program=program, start_s=timeout_s) as server:
        yield server


def served_visit(
    process: ServerProcess,
    model: Path,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clients: int,
    timeout_s: float,
) -> Visit:
    """A visit that sends all prompts, `clients` at a time, as streams; its time ends with the last answer."""
    server = Server(process.base_url, str(model), timeout_s=timeout_s)
    tasks = greedy_tasks(prompts, output_len)

    def visit() -> tuple[float, list[str]]:
        try:
            outcomes = asyncio.run(send_and_check(server, tasks, max_concurrency=clients))
        except RequestFailed as error:
            process.stop()  # what it still computes would slow the others down
            raise RequestFailed(f"{error}\n{process.output()}") from None
        return figures_of(outcomes).duration_s, [each.text for each in outcomes]

    return visit
