"""The size of a KV cache on a GPU: what is left after weights, the largest step and graphs, measured and added up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from draft_cases import make_head
from drafted import generate_drafted
from fake_graphs import FakeGraphs
from runner_graph_cases import SIZES, TINY, make_checkpoint, make_runner
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import KVCacheSpec
from model_runner import Acceptance, GraphShape, ModelRunner, Request, SamplingParams, ScheduledRequest, generate
from model_runner import runner as runner_module
from model_runner.memory.memory_profile import blocks_beside, graphs_in_all, largest_step
from model_runner.step.step import Step
from ranks import run_ranks
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from ubatch import CommGroup, ConfigError, ForwardMode
from ubatch.lanes.crew import Job

pytestmark = pytest.mark.long

TOTAL = 48 << 20
SHARE = 0.75
TOKENS = 120


class Memory(TorchDispatchMode):
    """A device with so many bytes, which every tensor that torch makes takes some of. A `DeviceMemory`.

    Attributes:
        asked: what was asked of it, in order.
    """

    def __init__(self, total: int = TOTAL, shared: Memory | None = None) -> None:
        super().__init__()
        self._total = total
        self._now = {"held": 0, "peak": 0} if shared is None else shared._now
        self.asked: list[str] = []

    def held(self) -> int:
        self.asked.append("held")
        return self._now["held"]

    def free(self) -> int:
        self.asked.append("free")
        return self._total - self._now["held"]

    def reset_peak(self) -> None:
        self.asked.append("reset")
        self._now["peak"] = self._now["held"]

    def peak(self) -> int:
        self.asked.append("peak")
        return self._now["peak"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _has_storage(leaf) and _key(leaf) not in known:
                known.add(_key(leaf))
                self._take(leaf.untyped_storage().nbytes())
                weakref.finalize(leaf.untyped_storage(), self._take, -leaf.untyped_storage().nbytes()).atexit = False
        return result

    def _take(self, nbytes: int) -> None:
        self._now["held"] += nbytes
        self._now["peak"] = max(self._now.values())


def _has_storage(leaf: object) -> bool:
    """Weights that oneDNN packed, which a process measures once, have none."""
    return isinstance(leaf, Tensor) and not leaf.is_mkldnn


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


checkpoint = checkpoint_fixture(make_checkpoint)


@contextmanager
def measured(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[ModelRunner, Memory]]:
    """A runner whose cache fills a share of such a device."""
    memory = Memory()
    for user in ("wrapping.eligibility", "wrapped"):
        monkeypatch.setattr(f"ubatch.{user}.why_not_in_lanes", lambda: None)  # the mode is in every lane, too
    run = Job._run_in_context

    def run_in_lane(job: Job) -> None:
        with Memory(shared=memory):
            run(job)

    monkeypatch.setattr(Job, "_run_in_context", run_in_lane)
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": SHARE, "memory": memory}
    settings |= {"max_num_batched_tokens": TOKENS, "max_model_len": 64}
    with memory, make_runner(checkpoint, **(settings | options)) as runner:
        yield runner, memory


def test_a_full_cache_leaves_room_for_the_largest_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(checkpoint, monkeypatch, lanes=2) as (runner, memory):
        assert memory.asked[:2] == ["held", "free"], "once the model is loaded"
        assert runner.free_kv_tokens == runner.kv_cache.num_blocks * runner.kv_cache.spec.block_size
        memory.reset_peak()
        prompts = [[1] * (TOKENS // 9)] * 9
        generate(runner, prompts, SamplingParams(max_tokens=3, temperature=1.0, top_p=0.8, seed=1))
        assert 0.93 * SHARE * TOTAL < memory.peak() <= SHARE * TOTAL


@pytest.mark.parametrize("drafts", [0, 3])
def test_and_for_the_widest_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Of a large vocabulary, all of which is ranked; and for each draft, too."""
    checkpoint = make_checkpoint(tmp_path, replace(TINY, vocab_size=6000))
    options = {"num_speculative_tokens": drafts, "acceptance": Acceptance.REJECTION}
    with measured(checkpoint, monkeypatch, **options) as (runner, memory):
        requests = [Request(n, [1] * 13, SamplingParams(temperature=1.0, top_p=0.9, logprobs=5)) for n in range(9)]
        for request in requests:
            runner.admit(request, 20)
        memory.reset_peak()
        runner.execute([ScheduledRequest(request, 13) for request in requests])
        for request in requests:
            request.advance(13, 1)
        runner.execute([ScheduledRequest(request, 1, (1,) * drafts) for request in requests])
        assert memory.peak() <= SHARE * TOTAL


def test_every_kind_of_step_runs_before_the_cache_is_sized(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport may make other buffers for decode steps."""
    ran: list[tuple[ForwardMode, int]] = []
    agree = ModelRunner.agree

    def noted(runner: ModelRunner, batch: Step, *args: Any) -> Step:
        ran.append((batch.mode, len(batch.shares)))
        return agree(runner, batch, *args)

    monkeypatch.setattr(ModelRunner, "agree", noted)
    prefill, decode = (ForwardMode.PREFILL, 9), (ForwardMode.DECODE, 9)
    with measured(checkpoint, monkeypatch):
        assert ran == 2 * [prefill, decode]
    ran.clear()
    with measured(checkpoint, monkeypatch, num_speculative_tokens=14):
        assert ran == 2 * [prefill, (ForwardMode.TARGET_VERIFY, TOKENS // 15), decode]


def unequal(rank: int) -> Any:
    """A `DeviceMemory` of a rank that holds nothing; the first rank has more free than the others."""
    free = (4 << 20) >> (8 * min(rank, 1))
    return SimpleNamespace(held=lambda: 0, free=lambda: free, reset_peak=lambda: None, peak=lambda: 0)


def with_unequal_memory(rank: int, world_size: int, checkpoint: Path) -> int:
    group = CommGroup.from_process_group(timeout_s=20)
    options: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 1.0, "memory": unequal(rank)}
    options |= {"group": group, "tensor_parallel_size": world_size, "block_size": 1, "max_num_batched_tokens": TOKENS}
    with make_runner(checkpoint, **options) as runner:
        return runner.kv_cache.num_blocks


def test_a_model_that_gives_no_finite_logits_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path)
    for file in checkpoint.glob("*.safetensors"):
        weights = load_file(file)
        for name in {"model.embed_tokens.weight"} & set(weights):
            weights[name][0] = torch.nan
        save_file(weights, file)
    with measured(checkpoint, monkeypatch) as (runner, _):
        assert runner.kv_cache.num_blocks > 1


def test_ranks_of_a_replica_measure_with_the_same_steps(checkpoint: Path) -> None:
    """Those that the one with least memory can run: steps that differ would be refused."""
    first, second = run_ranks(with_unequal_memory, 2, checkpoint)
    assert first == second


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [0, 2])
def test_and_for_all_graphs(checkpoint: Path, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(checkpoint, monkeypatch, lanes=lanes) as (eager, _):
        most, spec = eager.kv_cache.num_blocks, eager.kv_cache.spec
    fake = FakeGraphs()
    graphs = {"cudagraph_mode": "full", "cudagraph_capture_sizes": (1, 2, 4, 9), "graphs": fake}
    with measured(checkpoint, monkeypatch, lanes=lanes, **graphs) as (runner, _):
        assert fake.captures == (2 if lanes == 0 else 4), "the two largest of each kind"
        assert fake.alive == 0, "and given back"
        assert not runner.wrapper.graphs
        room = (most - runner.kv_cache.num_blocks) * spec.bytes_per_block
        taken = sum(graph.nbytes for graph in runner.capture_graphs())
        assert 0 < taken <= room + spec.bytes_per_block
        out = generate(runner, [[1] * 9] * 9, SamplingParams(max_tokens=3, ignore_eos=True))
        assert runner.statistics().graph_replays == 2
    with make_runner(checkpoint) as plain:
        expected = generate(plain, [[1] * 9] * 9, SamplingParams(max_tokens=3, ignore_eos=True))
    assert [each.token_ids for each in out] == [each.token_ids for each in expected]


@pytest.mark.slow
def test_and_for_a_draft_network(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, its cache of as many blocks, its steps and its graphs."""
    make_head(tmp_path / "head", hidden_size=TINY.hidden_size, vocab_size=TINY.vocab_size)
    drafts = SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=tmp_path / "head")
    with measured(checkpoint, monkeypatch, **runner_options(drafts)) as (eager, memory):
        params = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1, ignore_eos=True)
        memory.reset_peak()
        generate_drafted(eager, [[1] * 13] * 9, [params] * 9, drafts, max_num_batched_tokens=TOKENS)
        assert 0.93 * SHARE * TOTAL < memory.peak() <= SHARE * TOTAL
        assert eager.proposer is not None
        most, block = eager.kv_cache.num_blocks, eager.kv_cache.nbytes + eager.proposer.kv_cache.nbytes
    block //= most
    fake = FakeGraphs()
    graphs = {"cudagraph_mode": "full", "cudagraph_capture_sizes": (1, 2, 4, 9), "graphs": fake}
    with measured(checkpoint, monkeypatch, **graphs, **runner_options(drafts)) as (runner, _):
        assert fake.captures == 2 * 4, "the two largest of each kind: decode, verify, chain and extend"
        assert fake.alive == 0, "and given back"
        room = (most - runner.kv_cache.num_blocks) * block
        captured = runner.capture_graphs()
        assert len(captured) == len(runner.graph_shapes) == fake.alive == 4 * 4
        assert 0 < sum(graph.nbytes for graph in captured) <= room + block


@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_memory_of_the_cache_is_the_only_one(
    checkpoint: Path, lanes: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing keeps the small cache that was measured with, not even until the next one is made."""
    made: list[weakref.ref[Any]] = []
    alive = []
    make = runner_module.make_kv_cache

    def noted(*args: Any) -> Any:
        alive.append([cache() is not None for cache in made])
        cache = make(*args)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(runner_module, "make_kv_cache", noted)
    options: dict[str, Any] = {"lanes": lanes}
    if graphs:
        options |= {"cudagraph_mode": "full", "cudagraph_capture_sizes": (1, 2, 4, 9), "graphs": FakeGraphs()}
    with measured(checkpoint, monkeypatch, **options) as (runner, _):
        assert alive == [[], [False]]
        assert made[1]() is runner.kv_cache
    with make_runner(checkpoint):
        assert len(made) == 3, "with a given size there is nothing to measure"


def test_what_does_not_fit_is_refused_with_all_numbers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = r"takes \d+ \(weights \d+, the largest step \d+, graphs 0\), and two"
    for share, tokens, message in ((0.012, 10**5, steps), (0.001, TOKENS, r"the model takes \d+, and two KV blocks")):
        options = {"gpu_memory_utilization": share, "max_num_batched_tokens": tokens}
        with pytest.raises(ConfigError, match=message), measured(checkpoint, monkeypatch, **options):
            pass


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_the_cache_gets_what_is_left() -> None:
    block = KVCacheSpec(2, 1, 8, block_size=4).bytes_per_block
    assert blocks_beside(block, 1500 + 11 * block, 1500, 0.5) == 10, "one is for padding"
    assert blocks_beside(block, 1499 + 11 * block, 1500, 0.5) == 9
    with pytest.raises(ConfigError, match=r"takes 1500 \(weights 1000, the largest step 300\), and two"):
        blocks_beside(block, 1500 + block, 1500, 0.5, "weights 1000, the largest step 300")


@pytest.mark.parametrize(
    ("tokens", "seqs", "model_len", "blocks", "expected"),
    [
        (2048, 256, 4096, 10**6, (256, 8)),
        (2048, 4, 4096, 10**6, (4, 512)),
        (2048, 4, 100, 10**6, (4, 99)),
        (3, 256, 100, 10**6, (3, 1)),
        (2048, 4, 4096, 8, (4, 31)),
        (2048, 256, 4096, 8, (8, 15)),
        (2048, 256, 4096, 0, (1, 1)),
    ],
    ids=["many", "few", "short", "small", "little memory", "fewer requests", "none"],
)
def test_the_largest_step(tokens: int, seqs: int, model_len: int, blocks: int, expected: tuple[int, int]) -> None:
    spec = KVCacheSpec(2, 1, 8, block_size=16)
    assert largest_step(spec, tokens, seqs, model_len, blocks) == expected
    for drafts in (0, 5, 16):
        requests, length = largest_step(spec, tokens, seqs, model_len, blocks, drafts)
        assert requests * length <= tokens
        assert length + 1 + drafts <= model_len
        assert requests * spec.blocks_for(length + 1 + drafts) <= max(spec.blocks_for(2 + drafts), blocks)


def test_graphs_that_were_not_captured_take_what_the_last_of_their_kind_took() -> None:
    plain = [GraphShape(size, 1, 1, ForwardMode.DECODE) for size in (8, 4, 2, 1)]
    split = [GraphShape(size, 2, 1, ForwardMode.DECODE) for size in (4, 2)]
    sampled = [(plain[0], 100), (split[0], 70), (plain[1], 10), (split[1], 5)]
    assert graphs_in_all([*plain, *split], sampled) == 100 + 70 + 10 + 5 + 2 * 10
    assert graphs_in_all(plain[:1], sampled[:1]) == 100
    assert graphs_in_all((), ()) == 0


@pytest.mark.gpu
def test_on_a_gpu_all_of_it_fits(checkpoint: Path) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    options: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": SIZES, "device": "cuda"}
    with make_runner(checkpoint, num_kv_blocks=None, gpu_memory_utilization=0.5, **options) as runner:
        runner.capture_graphs()
        generate(runner, [[1] * 50] * 9, SamplingParams(max_tokens=3))
        torch.cuda.synchronize()
        assert 0.4 * free < torch.cuda.max_memory_reserved() <= 0.5 * free
