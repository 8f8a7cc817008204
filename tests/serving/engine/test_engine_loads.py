"""The experts' load: a rank tells it when a part of a window is over and before it pauses, and never waits in a step;
what the client has is that of the tokens that the ranks' routers have routed, each once."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_mains import LONG, PARAMS, PROMPTS, Served, kill_engine, run_recounting_engine, tiny, tokens_of, wait_for
from repository import TINY_MOE
from torch import Tensor

from moe import ExpertPlacement
from moe.balance import Ints, LoadKind, read_loads
from serving import LLM
from serving import SamplingParams as UserParams
from serving.engine.options import EngineOptions, RestartLimits
from serving.engine.rank.tracing import EXPERT_LOADS, LoadReporter, StepTracer
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire.messages import Loads, decode_from_engine, encode
from serving.scheduler import SchedulerConfig
from ubatch import UBatchConfig
from ubatch.streams import HostCopy
from ubatch.trace import read_chrome


@dataclass(eq=False)
class LateCopy(HostCopy):
    """A copy that arrives when the test says so."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(0))
    has_arrived: bool = False
    waited: bool = False

    def wait(self) -> Tensor:
        self.waited = not self.has_arrived
        return self.counts

    def done(self) -> bool:
        return self.has_arrived


class Device:
    """Counts that lie on a device: every step adds `1` to all of them."""

    def __init__(self, every: int = 3) -> None:
        self.counts = torch.zeros(2, 1, 2, dtype=torch.int64)
        self.copies: list[LateCopy] = []
        self.reporter = LoadReporter(self._copy, ExpertPlacement.default(1, 2, 2), every)

    def _copy(self) -> HostCopy:
        self.copies.append(LateCopy(self.counts, counts=self.counts.clone()))
        return self.copies[-1]

    def step(self, tokens: int = 1) -> None:
        self.counts += tokens
        self.reporter.stepped()

    def news(self, *, now: bool = False) -> list[tuple[int, int]]:
        return [(steps, int(counts.sum())) for steps, counts in self.reporter.news(now=now)]


def test_a_report_is_told_once_it_has_arrived() -> None:
    device = Device()
    for _ in range(3):
        assert device.news() == []
        device.step()
    (copy,) = device.copies
    for _ in range(4):  # it is late: the next one has to wait for it
        assert device.news() == []
        device.step()
    assert device.copies == [copy]
    copy.has_arrived = True
    assert device.news() == [(3, 12)]
    assert not copy.waited
    device.step()
    device.copies[-1].has_arrived = True
    assert device.news() == [(5, 20)]
    assert device.news() == []


def test_before_a_pause_all_is_told_at_once() -> None:
    device = Device()
    for _ in range(5):
        device.step()
    assert device.news(now=True) == [(3, 12), (2, 8)]
    assert device.news(now=True) == []
    device.step(0)
    assert device.news(now=True) == [(1, 0)], "the steps count, though this rank had no token"
    device.step()
    assert device.news(now=True) == [(1, 4)]


def test_total_leaves_the_reports_alone() -> None:
    device = Device()
    device.step()
    assert device.reporter.total().sum() == 4
    assert device.news(now=True) == [(1, 4)]


def test_a_profile_has_the_load_of_its_time(tmp_path: Path) -> None:
    device = Device()
    device.step(100)
    tracer = StepTracer(loads=device.reporter)
    tracer.start_profile()
    device.step(7)
    assert tracer.stop_profile(tmp_path / "rank-0.json", 0) is None
    (rank,) = read_chrome(tmp_path / "rank-0.json")
    told = rank.extra[EXPERT_LOADS]
    assert told == {"counts": [[[7, 7]], [[7, 7]]], "slots": [[0, 1]], "num_ranks": 2}


def test_a_kind_without_tokens_travels_as_nothing() -> None:
    counts: Ints = np.array([[[0, 0, 0]], [[1, 2, 2**40]]])
    message = Loads.of(3, 7, counts)
    assert message.prefill == b""
    read = decode_from_engine(encode(message))
    assert read == message
    assert isinstance(read, Loads)
    np.testing.assert_array_equal(read.counts((1, 3)), counts)


# -- what the client has -----------------------------------------------------------------------------------------------


LAYERS, EXPERTS, TOP_K = 4, 8, 2
CHUNKED = SchedulerConfig(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=16)
DBO = UBatchConfig(enable_dbo=True, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=4)


def counts_of(served: Served) -> Ints:
    return served.client.balance.window.counts


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        tiny(2, expert_parallel=True, dbo=DBO, scheduler=CHUNKED),
        tiny(1, expert_parallel=True, tensor_parallel_size=2, dbo=DBO),
        tiny(2, expert_parallel=True, scheduler=CHUNKED, speculation=SpeculationConfig(Algorithm.NGRAM, 3)),
    ],
    ids=["lanes and chunked prompts", "tensor parallel", "drafts"],
)
def test_ranks_tell_every_routed_token_once(options: EngineOptions, tmp_path: Path) -> None:
    with Served(replace(options, profile_folder=tmp_path), run_recounting_engine) as served:
        assert not counts_of(served).any(), "a warm-up does not count"
        served.run(served.all_outputs("a"))
        served.run(served.client.settle())
        routed = sum(len(prompt) for prompt in PROMPTS)
        # A follower of tensor parallelism tells its load itself, perhaps a moment later.
        served.run(wait_for(lambda: counts_of(served)[:, 0].sum() >= TOP_K * routed))
        overlapped = sum(
            steps
            for each in served.client.statistics.values()
            for name, steps in each.steps.items()
            if name.endswith("engaged")
        )
        assert bool(overlapped) is options.dbo.enable_dbo
        served.run(asyncio.sleep(0.2))
        counts = counts_of(served)
    recounts = [np.load(tmp_path / f"recount-{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(counts, sum(recounts))
    if options.speculation is None:
        decoded = sum(params.max_tokens - 1 for params in PARAMS)
        assert counts.sum(axis=(0, 2)).tolist() == [TOP_K * (routed + decoded)] * (LAYERS - 1) + [
            TOP_K * (len(PROMPTS) + decoded)
        ]
    assert counts[0].any()
    assert counts[1].any()


@pytest.mark.wide
def test_a_restart_keeps_the_window(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    with Served(tiny(2, expert_parallel=True, restarts=RestartLimits(3), expert_load_out=path)) as served:
        prompt = [5, 6, 7, 8]
        every = replace(LONG, max_tokens=20)
        per_request = [TOP_K * (len(prompt) + every.max_tokens - 1)] * (LAYERS - 1) + [TOP_K * every.max_tokens]
        for number in (1, 2):
            served.run(tokens_of(served.client, f"r{number}", prompt, every))
            served.run(served.client.settle())
            assert counts_of(served).sum(axis=(0, 2)).tolist() == [number * count for count in per_request]
            served.run(kill_engine(served.client))
            assert served.run(wait_for(lambda: served.client.pause is None))
        assert served.client.balance.window.steps == 2 * every.max_tokens
    assert read_loads(path).sum(axis=(0, 2)).tolist() == [2 * count for count in per_request]


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2, "enable_expert_parallel": True}])
def test_an_llm_has_it_too(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    params = UserParams(temperature=0, max_tokens=7, ignore_eos=True)
    with LLM(TINY_MOE, kv_cache_memory="16M", max_model_len=512, expert_load_out=path, **options) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        balance = llm.expert_balance()
    assert balance.placement.num_ranks == options.get("data_parallel_size", 1)
    assert balance.tokens(LoadKind.DECODE).sum(axis=1).tolist() == [TOP_K * 6 * len(PROMPTS)] * LAYERS
    assert balance.balancedness().shape == (LAYERS,)
    np.testing.assert_array_equal(read_loads(path).sum(axis=0), balance.tokens())


def test_ranks_of_tensor_parallelism_share_the_experts() -> None:
    """Also without `enable_expert_parallel`. If they do not divide, that is no placement on one rank."""
    with Served(tiny(1, tensor_parallel_size=2)) as served:
        assert served.client.balance.placement == ExpertPlacement.default(LAYERS, EXPERTS, 2)
