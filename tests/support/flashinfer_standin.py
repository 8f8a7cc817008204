"""Stand-ins for the parts of flashinfer that the attention back ends call: the same signatures, computed in torch.

Each computes from the arguments it gets, and from nothing else: pages from the table, lengths from `seq_lens`, scales,
window and sinks as they were passed. And each is stricter than a kernel, which reads what it is pointed at:

    tables        every entry names a page that exists; a row reaches as far as its request is said to
    workspaces    counters are zero at entry, and zero again after; the rest is overwritten; two lanes never share one
    scalars       the longest sequence is not longer than was said
    nothing seen  a row that sees no key, or that no request owns, is nan

Real kernels take half precision. These compute float32 inputs in float32, so that a small error shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import flashinfer_standin_wrappers
import torch
from flashinfer_standin_wrappers import attend, causal, check_ints, check_table, opaque
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.backends.flashinfer_kernels import FlashInferKernel

FP8 = torch.float8_e4m3fn
COUNTER_BYTES = 256
FLASHINFER_VERSION = "0.7.2.post1"
"""Whose signatures these are."""
_LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Call:
    """One call of a stand-in: which, by which lane, and with what."""

    name: str
    lane: str
    arguments: dict[str, Any]


@dataclass
class StandIns:
    """All stand-ins, what they were called with, and who called.

    Attributes:
        lane: set by a test, whose calls come next.
        xqa: whether MHA decode runs on XQA.
        exact: whether MLA decode of fp8 returns float32; the kernel's bfloat16 hides small errors.
        calls: so far.
        tensor_cores: whether each decode wrapper that was made has them.
    """

    lane: str = "whole"
    xqa: bool = False
    exact: bool = False
    calls: list[Call] = field(default_factory=list, repr=False)
    tensor_cores: list[bool] = field(default_factory=list)
    _owner_of_workspace: dict[int, str] = field(default_factory=dict)

    def find(self, kernel: FlashInferKernel) -> Callable[..., Any]:
        """What to put in the place of `find_kernel`."""
        name = kernel.value.partition(":")[2]
        if name.endswith("Wrapper"):
            wrapper: type = getattr(flashinfer_standin_wrappers, name)
            return type(name, (wrapper,), {"standins": self})
        function: Callable[..., Any] = getattr(self, name)
        return function

    def named(self, part: str) -> list[Call]:
        """The calls whose name contains `part`."""
        return [call for call in self.calls if part in call.name]

    # ---------------------------------------------------------------------------------------- TensorRT-LLM's kernels

    @opaque()
    def trtllm_batch_decode_with_kv_cache(
        self, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
        enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None,
        return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False,
        cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None,
        request_order_plan=None,
    ):  # fmt: skip
        self.enter("decode", locals(), workspace_buffer)
        assert mask is None, "a mask is for XQA's drafts"
        assert query.shape[0] == q_len_per_req * seq_lens.shape[0]
        starts = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32) * q_len_per_req
        return self._paged(
            query, kv_cache, kv_layout, block_tables, seq_lens, starts, max_seq_len, q_len_per_req,
            bmm1_scale, bmm2_scale, window_left, sinks, out_dtype,
        )  # fmt: skip

    @opaque()
    def trtllm_batch_context_with_kv_cache(
        self, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
        o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
        return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None,
        backend="trtllm-gen",
    ):  # fmt: skip
        self.enter("context", locals(), workspace_buffer)
        assert batch_size == seq_lens.shape[0]
        check_ints(cum_seq_lens_q, cum_seq_lens_kv, size=batch_size + 1)
        assert torch.equal(cum_seq_lens_kv[1:] - cum_seq_lens_kv[:-1], seq_lens)
        return self._paged(
            query, kv_cache, kv_layout, block_tables, seq_lens, cum_seq_lens_q, max_kv_len, max_q_len,
            bmm1_scale, bmm2_scale, window_left, sinks, out_dtype,
        )  # fmt: skip

    def _paged(
        self, query, kv_cache, kv_layout, tables, seq_lens, starts, max_seq_len, max_q_len,
        scale, out_scale, window_left, sinks, out_dtype,
    ):  # fmt: skip
        keys, values = kv_cache
        assert kv_layout == "HND"
        assert query.is_contiguous()
        assert keys.stride(-1) == values.stride(-1) == 1
        assert keys.dtype == values.dtype
        assert self.xqa or keys.dtype == query.dtype, "trtllm-gen takes fp8 everywhere or nowhere"
        pages, _, page, _ = keys.shape
        assert page in (16, 32, 64)
        check_table(tables, seq_lens, pages, page, max_seq_len)
        lens = (starts[1:] - starts[:-1]).tolist()
        assert max(lens) <= max_q_len
        out_dtype = query.dtype if out_dtype is None else out_dtype
        assert out_dtype in (query.dtype, torch.float16, torch.bfloat16, torch.float32)
        out = torch.full(query.shape, torch.nan, dtype=out_dtype)
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert sinks.shape == query.shape[1:2]
        for request, length in enumerate(seq_lens.tolist()):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            own = tables[request, : -(-length // page)].long()
            k, v = (pool[own].transpose(1, 2).flatten(0, 1)[:length] for pool in (keys, values))
            visible = causal(lens[request], length, window_left)
            out[rows] = (attend(query[rows], k, v, visible, scale, sinks=sinks)[0] * out_scale).to(out_dtype)
        return out

    @opaque()
    def trtllm_batch_decode_with_kv_cache_mla(
        self, query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables,
        seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
        skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
        uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto",
        cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None,
        enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None,
        return_lse_base=None,
    ):  # fmt: skip
        self.enter("mla_decode", locals(), workspace_buffer)
        assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
        batch, queries, _, width = query.shape
        pages, one, page, row = kv_cache.shape
        assert (one, row, width) == (1, 576, 576)
        assert page in (32, 64)
        assert query.is_contiguous()
        assert kv_cache.dtype == query.dtype
        assert block_tables.shape[0] == batch
        assert block_tables.shape[1] % (128 // page) == 0
        check_table(block_tables, seq_lens, pages, page, max_seq_len)
        exact = self.exact or query.dtype == torch.float32
        out = torch.full((*query.shape[:3], 512), torch.nan, dtype=torch.float32 if exact else torch.bfloat16)
        for request, length in enumerate(seq_lens.tolist()):
            own = block_tables[request, : -(-length // page)].long()
            rows = kv_cache[own].flatten(0, 2)[:length, None]
            visible = causal(queries, length, -1)
            out[request] = attend(query[request], rows, rows[..., :512], visible, bmm1_scale)[0] * bmm2_scale
        return out

    @opaque()
    def trtllm_ragged_attention_deepseek(
        self, query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
        batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse,
        attention_sinks=None, skip_softmax_threshold_scale_factor=None, out=None, lse=None, sage_attn_sfs=(None, None,
        None, None), num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend="trtllm-gen", q_seq_lens_cpu=None,
        kv_seq_lens_cpu=None, use_fp16_softmax=None, uses_spcompress=None, skip_all_rows_active_check=True,
    ):  # fmt: skip
        self.enter("ragged", locals(), workspace_buffer)
        assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128)
        assert query.is_contiguous()
        assert key.is_contiguous()
        assert value.is_contiguous()
        assert batch_size == seq_lens.shape[0]
        check_ints(seq_lens, size=batch_size)
        check_ints(cum_seq_lens_q, cum_seq_lens_kv, size=batch_size + 1)
        assert torch.equal(cum_seq_lens_kv[1:] - cum_seq_lens_kv[:-1], seq_lens)
        assert key.shape[0] == value.shape[0] == int(cum_seq_lens_kv[-1])
        assert query.shape[0] == int(cum_seq_lens_q[-1])
        assert int(seq_lens.max()) <= max_kv_len
        assert int((cum_seq_lens_q[1:] - cum_seq_lens_q[:-1]).max()) <= max_q_len
        assert window_left == -1
        out = torch.full((*query.shape[:2], value.shape[2]), torch.nan, dtype=query.dtype)
        lse = torch.full(query.shape[:2], torch.nan)
        for request, length in enumerate(seq_lens.tolist()):
            rows = slice(int(cum_seq_lens_q[request]), int(cum_seq_lens_q[request + 1]))
            own = slice(int(cum_seq_lens_kv[request]), int(cum_seq_lens_kv[request + 1]))
            count = rows.stop - rows.start
            visible = causal(count, length, -1) if is_causal else torch.ones(count, length, dtype=torch.bool)
            part, natural = attend(query[rows], key[own], value[own], visible, bmm1_scale)
            out[rows], lse[rows] = (part * bmm2_scale).to(out.dtype), natural / _LN_2
        return (out, lse) if return_lse else out

    @opaque()
    def mla_rope_quantize_fp8(
        self, q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None,
        quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None,
        enable_pdl=False,
    ):  # fmt: skip
        self.note("rope_quantize", {})
        assert cos_sin_cache.dtype == torch.float32
        cos, sin = cos_sin_cache[pos_ids].chunk(2, dim=-1)
        pairs = (
            (q_rope, q_rope_out, quant_scale_q, True),
            (k_rope[:, None], k_rope_out[:, None], quant_scale_kv, True),
            (q_nope, q_nope_out, quant_scale_q, False),
            (k_nope[:, None], k_nope_out[:, None], quant_scale_kv, False),
        )
        for given, wanted, scale, rotated in pairs:
            assert wanted.shape == given.shape
            assert wanted.dtype == quantize_dtype == FP8
            assert wanted.stride(-1) == given.stride(-1) == 1
            x = given.float()
            if rotated:
                a, b = x.chunk(2, dim=-1) if is_neox else (x[..., 0::2], x[..., 1::2])
                a, b = a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]
                x = torch.cat((a, b), dim=-1) if is_neox else torch.stack((a, b), dim=-1).flatten(-2)
            wanted.copy_((x * scale).clamp(-448, 448).to(FP8))
        return q_rope_out, k_rope_out, q_nope_out, k_nope_out

    # ------------------------------------------------------------------------------------------------------- checks

    def note(self, name: str, arguments: dict[str, Any]) -> None:
        """Note a call."""
        self.calls.append(Call(name, self.lane, {key: value for key, value in arguments.items() if key != "self"}))

    def enter(self, name: str, arguments: dict[str, Any], workspace: Tensor) -> None:
        """Note the call; use the workspace as a kernel does."""
        self.note(name, arguments)
        owner = self._owner_of_workspace.setdefault(workspace.data_ptr(), self.lane)
        assert owner == self.lane, f"{owner} and {self.lane} share a workspace"
        assert workspace.dtype == torch.uint8
        assert workspace.numel() > COUNTER_BYTES
        assert not workspace[:COUNTER_BYTES].any(), "the workspace's counters are not zero"
        workspace[COUNTER_BYTES:] = 0xAB


# ------------------------------------------------------------------------------------------------------- allocations


class CountAllocations(TorchDispatchMode):
    """Names the operations that return a tensor whose memory no argument of theirs has: the ones that allocate.

    That counts what an operation returns on the arguments' device. Room that a kernel takes for itself and gives back
    before it returns is not seen; none of the operations used here needs any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocating: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = memory_of((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if memory_of(result) - given:
            self.allocating.append(str(func))
        return result


def memory_of(arguments: Any) -> set[int]:
    """Addresses of the memory that the tensors and storages in there have."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    storages = [x.untyped_storage() if isinstance(x, torch.Tensor) else x for x in leaves]
    return {x.data_ptr() for x in storages if isinstance(x, torch.UntypedStorage) and x.nbytes()}


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """Count the torch operations in the block that allocate; numpy and Triton's interpreter do not count."""
    from triton.runtime.interpreter import GridExecutor

    launch: Callable[..., Any] = GridExecutor.__call__

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with opaque():
            return launch(*args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", unseen), CountAllocations() as mode:
        yield lambda: len(mode.allocating)
