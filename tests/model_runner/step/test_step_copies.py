"""No step waits for a copy: attention of every back end, and a runner's steps, on fake streams that refuse such copies.

A copy from pageable memory to the device, or to the host past the pinned buffers, waits for all that is queued. With
the overlap loop that is a whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import Batch, MLABatch
from checkpoints import checkpoint_fixture
from dense_checkpoint import make_small
from draft_cases import drafted_tokens
from flashinfer_cases import DECODE, EXTEND, LIMITS, MIXED, PREFIX, VERIFY, install, make, padded, run
from flashinfer_standin import StandIns
from request_steps import admitted, prefill
from step_cases import Recorder, StepStreamsFake, recorded, recording, tensors_of
from step_host import Place
from torch import Tensor

from attention import AttentionBackend, make_attention_backend
from attention.backends.flashinfer.pages import PackedMask, PageLists, list_pages_in_torch
from attention.kernels.batch import list_pages
from model_runner import ModelRunner, SamplingParams, generate
from model_runner.drafting import DraftProposer, DraftShape, load_draft
from model_runner.step.streams import StepStreams
from ubatch import ForwardMode
from ubatch.streams.small_copies import staged, to_device, to_host

pytestmark = pytest.mark.long

MHA, MLA = ("torch", "triton", "flashinfer", "trtllm_mha"), ("torch", "triton", "flashinfer", "trtllm_mla")
CPU = torch.device("cpu")
BATCHES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "padded decode": ([(20, 1), (0, 0), (3, 1), (0, 0)], {"mode": ForwardMode.DECODE, "padding": 2}),
    "prefix": (PREFIX, {}),
    "mixed": (MIXED, {}),
    "extend": (EXTEND, {"mode": ForwardMode.DRAFT_EXTEND}),
    "chain": (VERIFY, {"drafts": "chain"}),
    "tree": (VERIFY, {"drafts": "tree"}),
}
GRAPHS: dict[str, tuple[int, dict[str, Any], list[tuple[int, int]], list[tuple[int, int]]]] = {
    "decode": (1, {"mode": ForwardMode.DECODE}, [(5, 1), (20, 1), (9, 1), (2, 1)], [(70, 1), (33, 1)]),
    "chain": (3, {"drafts": "chain"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (90, 3)]),
    "tree": (3, {"drafts": "tree"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (90, 3)]),
    "extend": (3, {"mode": ForwardMode.DRAFT_EXTEND}, [(5, 3), (20, 1), (9, 2), (2, 3)], [(70, 1), (40, 2)]),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in flashinfer's place."""
    standins = StandIns()
    install(monkeypatch, standins.find)
    return standins


# -- attention ------------------------------------------------------------------------------------------------------


class Steps:
    """What steps of attention do on fake streams."""

    def __init__(self, batches: list[Batch | MLABatch], backend: AttentionBackend) -> None:
        self.fake = StepStreamsFake()
        self.streams = StepStreams(CPU, self.fake)
        device = [tensor for batch in batches for tensor in every_tensor(batch)]
        pools: Any = backend.kv_cache._pools  # type: ignore[attr-defined]
        self.recorder = Recorder(self.fake, [*device, *(pool.memory for pool in pools)])

    @property
    def faults(self) -> list[str]:
        """All that was found."""
        return self.fake.races + self.fake.faults


def every_tensor(thing: Any) -> Iterator[Tensor]:
    """The tensors of a dataclass, and of those in it."""
    for value in vars(thing).values():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dataclass_fields__"):
            yield from every_tensor(value)


def is_refused(name: str, mla: bool, kind: str) -> bool:
    return kind == "tree" and (name.startswith("trtllm") or (mla and name == "flashinfer"))


def cases(kinds: Iterable[str], mha: Sequence[str], mla: Sequence[str]) -> list[Any]:
    names = [(name, False) for name in mha] + [(name, True) for name in mla]
    return [
        pytest.param(name, latent, kind, id=f"{'mla' if latent else 'mha'}-{name}-{kind}")
        for (name, latent), kind in product(names, kinds)
        if not is_refused(name, latent, kind)
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "mla", "kind"), cases(BATCHES, MHA, MLA))
def test_attention_of_a_step(monkeypatch: pytest.MonkeyPatch, name: str, mla: bool, kind: str) -> None:
    requests, options = BATCHES[kind]
    batch = make(requests, mla=mla, block_size=32 if mla else 16, **options)
    backend = make_attention_backend(name, batch.shape, batch.new_cache())
    steps = Steps([batch], backend)
    with recorded(steps.recorder, monkeypatch):
        for _ in range(2):  # the second one overwrites what the first one staged
            with torch.inference_mode(), steps.streams.forward():
                with steps.streams.planning():
                    plan = backend.plan(batch.metadata)
                out = run(plan, batch)
    assert steps.faults == []
    torch.testing.assert_close(out, batch.expected(), atol=1e-4, rtol=1e-4)
    assert steps.fake.tagged("", "forward")


@pytest.mark.wide
@pytest.mark.sample(7)
@pytest.mark.parametrize(("name", "mla", "kind"), cases(GRAPHS, MHA[1:], MLA[1:]))  # torch's cannot be captured
def test_attention_before_a_replay(monkeypatch: pytest.MonkeyPatch, name: str, mla: bool, kind: str) -> None:
    num_queries, options, first, second = GRAPHS[kind]
    if mla:
        options = {**options, "block_size": 32}
    captured, later = (padded(requests, num_queries, mla=mla, **options) for requests in (first, second))
    cache = max(captured, later, key=lambda batch: batch.num_blocks).new_cache()
    backend = make_attention_backend(name, captured.shape, cache)
    steps = Steps([captured, later], backend)
    with recorded(steps.recorder, monkeypatch), torch.inference_mode():
        with steps.streams.forward(), steps.streams.planning():
            backend.init_graph_buffers(LIMITS)
            plan = backend.plan_for_graph(captured.metadata)
        for batch in (captured, later):
            with steps.streams.forward():
                with steps.streams.planning():
                    backend.replan(plan, batch.metadata)
                run(plan, batch)
    assert steps.faults == []


# -- pages, and masks -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("padded_queries", [0, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_listing_pages(block_size: int, padded_queries: int) -> None:
    """The kernel against the reference, and both against the definition; some requests have no queries."""
    generator = torch.Generator().manual_seed(block_size)
    for num_reqs in (1, 5, 33):
        query_lens = torch.randint(0, 4, (num_reqs,), generator=generator)
        query_lens[0] = 1
        seq_lens = query_lens + torch.randint(0, 60, (num_reqs,), generator=generator)
        lens = seq_lens.tolist()
        for index, new in enumerate(query_lens.tolist()):
            if padded_queries:
                lens[index] = lens[index] - new + padded_queries if new else padded_queries
            elif not new:
                lens[index] = 0
        counts = [-(-length // block_size) for length in lens]
        table = torch.randint(0, 1000, (num_reqs, max(counts) + 2), generator=generator, dtype=torch.int32)
        table = table.t().contiguous().t() if num_reqs == 5 else table  # any strides
        starts = torch.cat((torch.zeros(1), query_lens.cumsum(0))).int()
        expected = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
        for lister in (list_pages, list_pages_in_torch):
            found = torch.full_like(expected, -1)
            options = {"block_size": block_size, "most_pages": max(counts), "padded_queries": padded_queries}
            lister(found, table, starts, seq_lens.int(), **options)
            assert torch.equal(found, expected), lister


def test_packing_a_mask() -> None:
    """As numpy packs each request's part."""
    batch = make([(9, 4), (30, 4), (1, 4)], drafts="tree")
    verify = batch.metadata.spec_verify
    assert verify is not None
    assert verify.custom_mask is not None
    packed = PackedMask.of(verify.custom_mask, PageLists.of(batch.metadata, 16))
    masks = [verify.mask_of(request) for request in range(3)]
    parts = [np.packbits(mask.numpy(), bitorder="little") for mask in masks if mask is not None]
    assert packed.bits.tolist() == np.concatenate(parts).tolist()
    assert packed.starts.tolist() == np.cumsum([0, *map(len, parts)]).tolist()
    assert packed.starts.dtype == torch.int32


# -- steps of a runner ------------------------------------------------------------------------------------------------

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 5]
DRAWN = [
    SamplingParams(max_tokens=4, allowed_token_ids=tuple(range(0, 60, 2)), bad_token_sequences=((8,), (6, 10))),
    SamplingParams(max_tokens=4, temperature=1.4, seed=4, top_k=60),
    SamplingParams(max_tokens=4, temperature=0.9, seed=5, top_p=0.7, logprobs=2, logit_bias=((7, 3.0),)),
    SamplingParams(max_tokens=4, temperature=0.9, seed=5, min_p=0.01, repetition_penalty=1.2),
]


checkpoint = checkpoint_fixture(make_small, dense=True, layers=1)


@contextmanager
def made(checkpoint: Path, fake: StepStreamsFake | None = None, **options: Any) -> Iterator[ModelRunner]:
    """With experts that pack nothing: the fake sees torch's operators, not the kernels in C."""
    sizes = {"num_kv_blocks": 60, "block_size": 16, "max_num_seqs": 6, "experts_backend": "grouped"}
    with ModelRunner(checkpoint, streams=fake, **sizes, **options) as runner:
        yield runner


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", MHA)
def test_steps_of_a_runner(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, attention: str) -> None:
    fake = StepStreamsFake()
    with made(checkpoint, attention_backend="torch") as plain:
        expected = [output.token_ids for output in generate(plain, PROMPTS, DRAWN)]
    with made(checkpoint, fake, attention_backend=attention) as runner, recording(runner, fake, monkeypatch):
        found = [output.token_ids for output in generate(runner, PROMPTS, DRAWN)]
    assert fake.races + fake.faults == []
    assert found == expected


@pytest.mark.wide
@pytest.mark.sample(4)
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("attention", ["torch", "triton", "flashinfer"])
def test_drafting(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, attention: str, topk: int) -> None:
    """A draft model that is the target: its catching up, its steps or levels, and their verification."""
    fake = StepStreamsFake()
    with made(checkpoint, fake, attention_backend=attention) as runner:
        shape = DraftShape(3, topk, num_drafts=3 if topk == 1 else 5, sampled=False)
        proposer = DraftProposer(runner, load_draft("draft_model", checkpoint, runner), shape)
        runner.set_observer(proposer)
        device = [*tensors_of(proposer), *tensors_of(proposer._draft.kv_cache)]
        network: Any = proposer._draft.network._model  # type: ignore[attr-defined]
        device += [*network.parameters(), *network.buffers()]
        with recording(runner, fake, monkeypatch) as recorder:
            for tensor in [*device, *(pool.memory for pool in proposer._draft.kv_cache._pools)]:
                recorder.put(tensor, Place.DEVICE)
            requests = admitted(runner, PROMPTS[:3])
            prefill(runner, requests)
            drafted_tokens(runner, proposer, requests, 8, 3 if topk == 1 else 5)
    assert fake.races + fake.faults == []


# -- what is refused --------------------------------------------------------------------------------------------------


def test_copies_that_would_wait_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = StepStreamsFake()
    streams, there, device = StepStreams(CPU, fake), torch.arange(4), CPU
    recorder = Recorder(fake, [there])

    def found(step: Any) -> list[str]:
        fake.faults.clear()
        with recorded(recorder, monkeypatch), streams.forward():
            step()
        return list(fake.faults)

    assert found(lambda: to_host(there).wait().tolist()) == []
    assert found(lambda: there.add_(to_device([torch.tensor([1, 2, 3, 4])], device)[0])) == []
    assert found(lambda: there.copy_(staged([torch.tensor([1, 2, 3, 4])], device)[0], non_blocking=True)) == []
    assert found(lambda: torch.arange(4, device=device).add_(there)) == []
    pageable: list[tuple[Any, str]] = [
        (lambda: torch.tensor([1, 2], device=device), "from pageable memory"),
        (lambda: torch.tensor([1, 2]).to(device), "from pageable memory"),
        (lambda: torch.tensor([1, 2]).to(device, non_blocking=True), "from pageable memory"),
        (lambda: there.copy_(torch.tensor([1, 2, 3, 4])), "tensors of the host and of the device"),
        (lambda: torch.empty(4, dtype=torch.int64).copy_(there), "tensors of the host and of the device"),
        (lambda: there[torch.tensor([1, 2])], "tensors of the host and of the device"),
        (lambda: there.cpu(), "makes the host wait"),
        (lambda: there.to("cpu"), "makes the host wait"),
        (lambda: there.tolist(), "makes the host wait"),
        (lambda: there.numpy(), "makes the host wait"),
        (lambda: there[0].item(), "makes the host wait"),
        (lambda: bool(there.any()), "makes the host wait"),
        (lambda: there[there > 1], "makes the host wait"),
        (lambda: there.nonzero(), "makes the host wait"),
    ]
    for step, message in pageable:
        assert any(message in fault for fault in found(step)), message
