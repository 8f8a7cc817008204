"""Graph buffers: right values at addresses that never move, without a single allocation."""

from dataclasses import replace

import pytest
import torch
from attention_batches import make_batch
from flashinfer_standin import CountAllocations
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import CommonAttentionMetadata, GraphLimits
from attention.graph_buffers import GraphBuffers
from ubatch import ConfigError

BLOCK_SIZE = 4
HIDDEN_SLOT = 4000
LIMITS = GraphLimits(max_reqs=6, max_tokens=20, max_seq_len=40)
STATIC = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


def new_buffers(limits: GraphLimits = LIMITS, seq_len_fill: int = 1, *, fused: bool = False) -> GraphBuffers:
    """With `fused` they are filled by the kernel, in Triton's interpreter."""
    buffers = GraphBuffers(limits, BLOCK_SIZE, "cpu", hidden_slot=HIDDEN_SLOT, seq_len_fill=seq_len_fill)
    buffers._fused = fused
    return buffers


def batch_of(*requests: tuple[int, int], padding: int = 0) -> CommonAttentionMetadata:
    return make_batch(requests, block_size=BLOCK_SIZE, padding=padding).metadata


def check_filled(buffers: GraphBuffers, metadata: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> None:
    """What a kernel reads is the batch, and everything else is harmless."""
    starts = buffers.query_start_loc[: num_reqs + 1].tolist()
    lengths = buffers.seq_lens[:num_reqs].tolist()
    for request in range(num_reqs):
        row = buffers.block_table[request].tolist()
        queries = metadata.query_lens_cpu[request] if request < metadata.num_reqs else 0
        assert starts[request + 1] - starts[request] == queries
        if not queries:
            assert lengths[request] == buffers.seq_len_fill
            assert not any(row)
            continue
        blocks = -(-lengths[request] // BLOCK_SIZE)
        assert lengths[request] == metadata.seq_lens_cpu[request]
        assert row[:blocks] == metadata.block_table[request, :blocks].tolist()
        assert not any(row[blocks:])
    wanted = [slot if slot >= 0 else HIDDEN_SLOT for slot in metadata.slot_mapping.tolist()]
    assert buffers.slot_mapping[:num_tokens].tolist() == wanted + [HIDDEN_SLOT] * (num_tokens - len(wanted))


@pytest.mark.parametrize(
    "metadata",
    [
        batch_of((5, 1), (9, 1), (2, 1)),
        batch_of((30, 3), (0, 7), padding=4),
        batch_of((8, 2), (0, 0), (0, 0), padding=2),
        batch_of((39, 1)),
        batch_of((0, 0)),
        batch_of(),
    ],
    ids=["decode", "ragged", "padding requests", "as long as allowed", "only padding", "nothing"],
)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_a_padded_batch_is_what_kernels_read(metadata: CommonAttentionMetadata, fused: bool) -> None:
    buffers = new_buffers(seq_len_fill=3, fused=fused)
    buffers.query_start_loc.fill_(88)
    buffers.slot_mapping.fill_(99)
    buffers.seq_lens.fill_(66)
    buffers.block_table.fill_(77)  # as if left from an earlier batch
    buffers.fill(metadata, 5, 18)
    check_filled(buffers, metadata, 5, 18)


def test_filling_moves_no_pointer_and_allocates_nothing() -> None:
    buffers = new_buffers()
    batches = [batch_of((5, 1), (9, 1), (2, 1)), batch_of((30, 3), (0, 7), (0, 0), padding=4), batch_of((39, 1))]
    before = {name: getattr(buffers, name).data_ptr() for name in STATIC}
    size = buffers.nbytes
    with CountAllocations() as counted:
        for metadata in batches:
            buffers.fill(metadata, 6, 20)
    assert counted.allocating == []
    assert {name: getattr(buffers, name).data_ptr() for name in STATIC} == before
    assert buffers.nbytes == size


def test_the_counter_sees_an_allocation() -> None:
    x = torch.zeros(3)
    with CountAllocations() as counted:
        x.add_(1)
        torch.add(x, 1, out=x)
        x[:2].fill_(0)
        assert counted.allocating == []
        _ = x + 1
    assert len(counted.allocating) == 1


@pytest.mark.parametrize(
    ("metadata", "num_reqs", "num_tokens", "complaint"),
    [
        (batch_of((5, 1), (9, 1)), 1, 4, "1 requests cannot run a batch of 2"),
        (batch_of((5, 3)), 2, 2, "2 tokens cannot run a batch of 3"),
        (batch_of((5, 1)), 7, 7, "7 requests exceeds"),
        (batch_of((5, 1)), 6, 21, "21 tokens exceeds"),
        (batch_of((40, 1)), 2, 2, "41 tokens in a request exceeds"),
    ],
)
def test_what_does_not_fit_is_refused(
    metadata: CommonAttentionMetadata, num_reqs: int, num_tokens: int, complaint: str
) -> None:
    buffers = new_buffers()
    before = buffers.slot_mapping.clone()
    with pytest.raises(ConfigError, match=complaint):
        buffers.fill(metadata, num_reqs, num_tokens)
    assert torch.equal(buffers.slot_mapping, before)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len must be at least 1, not 0"):
        new_buffers(GraphLimits(1, 1, 0))


def test_bytes_are_counted() -> None:
    limits = GraphLimits(max_reqs=3, max_tokens=5, max_seq_len=17)  # 5 blocks
    tables = 3 * 5 * (4 + 1) + 5 * 4
    assert new_buffers(limits).nbytes == tables + (3 + 1) * 4 + 2 * 3 * 4 + 5 * (8 + 1)


@pytest.mark.long
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_the_kernel_fills_what_torch_fills(data: st.DataObject) -> None:
    """Every number of the static tensors, those behind the padded size too: nobody touches them."""
    requests = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=6))
    metadata = batch_of(*requests, padding=data.draw(st.integers(0, 2)))
    num_reqs = data.draw(st.integers(max(1, len(requests)), 6))
    num_tokens = data.draw(st.integers(metadata.slot_mapping.shape[0], 20))
    filled = []
    for fused in (False, True):
        buffers = new_buffers(seq_len_fill=2, fused=fused)
        for name in STATIC:
            getattr(buffers, name).fill_(7)
        buffers.fill(metadata, num_reqs, num_tokens)
        filled.append([getattr(buffers, name) for name in STATIC])
    for by_torch, by_kernel, name in zip(*filled, STATIC, strict=True):
        assert torch.equal(by_torch, by_kernel), name


@pytest.mark.gpu
def test_the_kernel_fills_what_torch_fills_compiled() -> None:
    limits = GraphLimits(max_reqs=600, max_tokens=2400, max_seq_len=9000)
    metadata = batch_of(*[(length * 13, 4) for length in range(500)])
    moved = replace(metadata, **{name: getattr(metadata, name).cuda() for name in STATIC})
    on_cpu = GraphBuffers(limits, BLOCK_SIZE, "cpu", hidden_slot=10**10, seq_len_fill=1)
    on_gpu = GraphBuffers(limits, BLOCK_SIZE, "cuda", hidden_slot=10**10, seq_len_fill=1)
    on_cpu.fill(metadata, 512, 2048)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    on_gpu.fill(moved, 512, 2048)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for name in STATIC:
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu()), name
