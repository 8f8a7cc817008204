"""What engine processes run in tests: the real thing, or one that fails; their client; and prompts."""

import asyncio
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch.distributed as dist
from repository import TINY_MOE
from torch import Tensor

from model_runner import ModelRunner, PendingStep, Proposer, SamplingParams, Step
from moe import ExpertMap, modular_kernel
from moe.expert_map import LayerLoad
from ranks import free_port
from serving.engine import EngineClient, EngineCore, EngineOptions, run_node
from serving.engine.launch import EngineMain
from serving.engine.rank import process
from serving.engine.rank.process import run_engine
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Ready
from serving.engine.wire.rendezvous import Place
from serving.processes import process_state
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import ForwardMode, UBatchConfig, get_forward_context
from ubatch.ranks import near

T = TypeVar("T")

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPTS = [[(index * 13 + place) % 2000 + 1 for place in range(3 + 5 * index)] for index in range(8)]
PARAMS = [
    SamplingParams(max_tokens=6 + index, ignore_eos=True, temperature=0.8 if index % 2 else 0.0, seed=index)
    for index in range(8)
]
POISON = 666
"""A step with this token fails, with `run_poisonable_engine`."""


def tiny(ranks: int = 1, *, expert_parallel: bool = False, **options: Any) -> EngineOptions:
    """A small engine: overlaps from 4 tokens on."""
    settings: dict[str, Any] = {
        "scheduler": SchedulerConfig(max_model_len=512, max_num_seqs=16),
        "dbo": UBatchConfig(dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8),
        "kv_cache_memory": 16 << 20,
        **options,
    }
    return EngineOptions(TINY_MOE, data_parallel_size=ranks, enable_expert_parallel=expert_parallel, **settings)


def core_over(
    runner: ModelRunner, *, overlap: bool = False, proposer: Proposer | None = None, **config: Any
) -> EngineCore:
    """The loop over a scheduler and a real runner, without a process; `config` is the scheduler's."""
    scheduler = Scheduler(
        SchedulerConfig(**config),
        runner.allocator,
        runner.request_table,
        eos_token_ids=runner.config.eos_token_ids,
        vocab_size=runner.config.vocab_size,
        proposer=proposer,
    )
    return EngineCore(runner, scheduler, overlap_schedule=overlap)


async def tokens_of(client: EngineClient, name: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What a request gives, in all."""
    tokens: list[int] = []
    async for output in client.generate(RequestInput(name, prompt, params)):
        tokens += output.token_ids
    return tokens


def run_poisonable_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which a step with `POISON` raises on the rank that has it."""
    launch = ModelRunner.launch

    def poisoned(runner: ModelRunner, step: Step) -> PendingStep:
        if any(POISON in share.request.token_ids for share in getattr(step, "shares", step)):
            raise ZeroDivisionError("poisoned")
        return launch(runner, step)

    ModelRunner.launch = poisoned  # type: ignore[method-assign]
    run_engine(options, rank, place)


def run_engine_with_poisonable_schedule(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which the scheduler raises on the rank that has a request with `POISON`, waiting or not."""
    schedule = Scheduler.schedule

    def poisoned(scheduler: Scheduler) -> Step:
        for request in scheduler._requests.values():
            if POISON in request.token_ids:
                raise ZeroDivisionError("poisoned")
        return schedule(scheduler)

    Scheduler.schedule = poisoned  # type: ignore[method-assign]
    run_engine(options, rank, place)


def run_engine_that_finds_the_other_gone(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which rank 1 ends while the ranks connect, and gloo tells rank 0 before that is noticed."""

    def connect(*_: Any, **how: Any) -> None:
        if rank == 0:
            raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] Connection closed by peer")
        time.sleep(0.3)
        os._exit(3)

    dist.init_process_group = connect
    run_engine(options, rank, place)


LATE_S = 12.0
"""How much later than rank 0 rank 1 has its model, with `run_uneven_engine`."""


def run_uneven_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which rank 1 takes long to load, as if it compiled what others do not."""
    load = process.make_runner

    def load_late(*args: Any, **kwargs: Any) -> ModelRunner:
        time.sleep(LATE_S * rank)
        return load(*args, **kwargs)

    process.make_runner = load_late
    run_engine(options, rank, place)


DROWSY_S = 1.0
"""How long rank 1 does nothing after it is ready, with `run_drowsy_engine`."""


def run_drowsy_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which rank 1 loses the processor as soon as it is ready, as on a busy machine."""
    send = EngineLink.send

    def send_and_sleep(link: EngineLink, message: Any) -> None:
        send(link, message)
        if isinstance(message, Ready):
            time.sleep(DROWSY_S * rank)

    EngineLink.send = send_and_sleep  # type: ignore[method-assign]
    run_engine(options, rank, place)


def run_engine_that_connects_to_nobody(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, which fails when it has sockets, and says whether its own lies in the folder of the run."""

    def connected(own: int, _: object, paths: Sequence[str], __: float) -> NoReturn:
        raise OSError(f"in the run's folder: {Path(paths[own]).is_relative_to(place.folder)}")

    near._connected = connected
    run_engine(options, rank, place)


def run_recounting_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, which at its end writes `[2, L, E]` to the profiles' folder: every routed token, counted one layer
    at a time by numpy, in prefill and in decode steps."""
    counted: dict[int, np.ndarray] = {}
    count, clear = modular_kernel.map_and_count, ModelRunner.clear_expert_loads

    def recount(topk_ids: Tensor, expert_map: ExpertMap | None, load: LayerLoad | None) -> Tensor:
        context = get_forward_context()
        if load is not None and context is not None:
            decodes = context.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
            of_layer = counted.setdefault(load[0].data_ptr(), np.zeros((2, len(load[0])), dtype=np.int64))
            ids = topk_ids.numpy().ravel()
            of_layer[int(decodes)] += np.bincount(ids[ids >= 0], minlength=len(load[0]))
        return count(topk_ids, expert_map, load)

    def forget(runner: ModelRunner) -> None:
        counted.clear()
        clear(runner)

    modular_kernel.map_and_count = recount
    ModelRunner.clear_expert_loads = forget  # type: ignore[method-assign]
    run_engine(options, rank, place)
    assert options.profile_folder is not None
    np.save(options.profile_folder / f"recount-{rank}.npy", np.stack([counted[at] for at in sorted(counted)], axis=1))


def sleep_for_ever(options: EngineOptions, rank: int, place: Place) -> None:
    """A rank that never joins."""
    time.sleep(3600)


def exit_at_once(options: EngineOptions, rank: int, place: Place) -> None:
    """A process that dies before it can say anything."""
    os._exit(7)


def secret_file(path: Path, text: str | None = None) -> Path:
    """A file with a cluster's secret: this one, or a new one."""
    path.touch(0o600)
    path.write_text(secrets.token_hex(32) if text is None else text)
    return path


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Poll; whether it became true within the time."""
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


async def wait_for(true: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """`wait_until` that lets the event loop run."""
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return true()


async def kill_engine(client: EngineClient, number: int = signal.SIGKILL, rank: int = 0) -> None:
    """Kill an engine, and wait until this is noticed."""
    pid = client.pids[rank]
    assert pid is not None
    os.kill(pid, number)
    assert await wait_for(lambda: client.pause is not None or client.dead is not None)


def run_telling_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """Write to the run's profiles' folder whether the rank has attached the model of an earlier process."""
    make_runner = process.make_runner

    def told(*args: Any, **settings: Any) -> ModelRunner:
        runner = make_runner(*args, **settings)
        assert options.profile_folder is not None
        kept = runner.settings.kept
        with (options.profile_folder / f"rank{rank}").open("a") as file:
            print(kept is not None and kept.attached, file=file)
        return runner

    process.make_runner = told
    run_engine(options, rank, place)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    return process_state(pid) not in ("", "Z")


def engine_of_rank(rank: int) -> int:
    """The process of a rank that this process has started, whichever node it plays."""
    return next(p.pid for p in multiprocessing.active_children() if p.name == f"rank {rank}" and p.pid is not None)


@asynccontextmanager
async def started(options: EngineOptions, main: EngineMain = run_engine) -> AsyncIterator[EngineClient]:
    """Engines that end with the block; their client."""
    client = await EngineClient.start(options, engine_main=main)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def two_nodes(
    main: EngineMain = run_engine, **options: Any
) -> AsyncIterator[tuple[EngineClient, asyncio.Task[int]]]:
    """A run of two ranks on two nodes, both on this machine: node 0's client, and node 1's exit status to come."""
    both = {"nnodes": 2, "master_port": free_port(), **options}
    node = asyncio.create_task(asyncio.to_thread(run_node, tiny(2, node_rank=1, **both), engine_main=main))
    async with started(tiny(2, **both), main) as client:
        yield client, node


class Served:
    """A client, and the loop that it lives on."""

    def __init__(self, options: EngineOptions, engine_main: EngineMain = run_engine) -> None:
        self._runner = asyncio.Runner()
        try:
            self.client = self.run(EngineClient.start(options, engine_main=engine_main))
        except BaseException:
            self._runner.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def all_outputs(self, prefix: str) -> list[list[int]]:
        names = [f"{prefix}-{index}" for index in range(len(PROMPTS))]
        return await asyncio.gather(
            *[tokens_of(self.client, *each) for each in zip(names, PROMPTS, PARAMS, strict=True)]
        )

    async def drained(self) -> bool:
        """Whether nothing runs any more, and every block is free, as far as every rank says."""

        def nothing_runs() -> bool:
            statistics = self.client.statistics.values()
            return all(each.num_running == each.num_waiting == each.kv_usage == 0 for each in statistics)

        return await wait_for(nothing_runs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.close())
        self._runner.close()
