"""Stand-ins for flashinfer's wrappers and its fused experts, and the arithmetic of all stand-ins.

See `flashinfer_standin`.

A wrapper runs what it was planned for. In a graph it reads the buffers that it was given when it was made, and nothing
else; planning copies into them. Its copies are to be seen by whoever watches, as their sources are our choice; what it
computes is not: kernels are no operations of torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

DECODE_PLAN_OPTIONS = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}
"""Keywords of the decode wrapper's plan, whose signature does not tell them."""


@contextmanager
def opaque() -> Iterator[None]:
    """What is done in the `with` block is the library's: nobody who watches torch sees it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def check_ints(*tensors: Tensor, size: int) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.shape == (size,)
        assert tensor.is_contiguous()


def check_table(tables: Tensor, seq_lens: Tensor, pages: int, page: int, max_seq_len: int) -> None:
    check_ints(seq_lens, size=tables.shape[0])
    assert tables.dtype == torch.int32
    assert tables.stride(-1) == 1
    assert int(tables.min()) >= 0, "the table names a page before the first"
    assert int(tables.max()) < pages, "the table names a page behind the last"
    assert int(seq_lens.min()) >= 1
    assert int(seq_lens.max()) <= max_seq_len, "a sequence is longer than max_seq_len"
    assert int(seq_lens.max()) <= tables.shape[1] * page, "a sequence is longer than its row of the table"


def causal(queries: int, keys: int, window_left: int) -> Tensor:
    """`[queries, keys]`, the last query aligned with the last key."""
    assert queries <= keys, "a query before the first key"
    query = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)
    seen = key <= query
    return seen if window_left < 0 else seen & (key >= query - window_left)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, *, sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[n, heads, dv]` float32, and natural LSE `[n, heads]`; rows that see nothing are nan."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,khd->nhk", query.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks)
    out = torch.einsum("nhk,khd->nhd", (scores - total[..., None]).exp(), values)
    nothing = ~visible.any(dim=-1)
    return out.masked_fill(nothing[:, None, None], torch.nan), lse.masked_fill(nothing[:, None], torch.nan)


class _Wrapper:
    """What flashinfer's wrappers share: buffers that are copied into in a graph, replaced otherwise."""

    standins: Any
    """who counts calls and checks workspaces"""

    def _keep(self, name: str, value: Tensor, used: int | None = None) -> None:
        if not self._use_cuda_graph:
            there = self._workspace.new_empty(value.shape, dtype=value.dtype)
            setattr(self, name, there.copy_(value, non_blocking=True))
            return
        buffer = getattr(self, name)
        assert buffer is not None, f"{name} is needed in a graph"
        if used is None:
            assert buffer.shape == value.shape
            buffer.copy_(value, non_blocking=True)
        else:
            assert used <= buffer.shape[0]
            buffer[:used].copy_(value, non_blocking=True)

    def buffers(self) -> dict[str, int]:
        """Where its tensors are."""
        return {name: x.data_ptr() for name, x in vars(self).items() if isinstance(x, Tensor)}

    def _run(self, query, kv, starts, lens, indptr, indices, options, mask=None):
        """Attention of ragged queries over lists of pages."""
        keys, values = kv
        page = keys.shape[1]
        out = torch.full((*query.shape[:2], values.shape[-1]), torch.nan, dtype=query.dtype)
        for request, length in enumerate(lens):
            rows = slice(starts[request], starts[request + 1])
            own = indices[indptr[request] : indptr[request + 1]].long()
            assert len(own) == -(-length // page)
            assert 0 <= int(own.min()) <= int(own.max()) < keys.shape[0]
            k, v = (pool[own].flatten(0, 1)[:length] for pool in (keys, values))
            visible = causal(rows.stop - rows.start, length, options.get("window_left", -1))
            if mask is not None:
                visible = mask[request].view(-1, length)
            elif not options.get("causal", True):
                visible = torch.ones_like(visible)
            out[rows] = attend(
                query[rows], k, v, visible, options["sm_scale"], soft_cap=options.get("logits_soft_cap")
            )[0].to(out.dtype)
        return out


def _lens_of(indptr: Tensor, last_page_len: Tensor, page: int) -> list[int]:
    assert int(last_page_len.min()) >= 1
    assert int(last_page_len.max()) <= page
    return ((indptr[1:] - indptr[:-1] - 1) * page + last_page_len).tolist()


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """flashinfer's wrapper for ragged queries."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        self._workspace = float_workspace_buffer
        self._use_cuda_graph = use_cuda_graph
        self._starts = qo_indptr_buf
        self._indptr = paged_kv_indptr_buf
        self._indices = paged_kv_indices_buf
        self._last = paged_kv_last_page_len_buf
        self._mask = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf
        self._max_rows = None
        self._takes_masks = None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        arguments = locals()
        check_ints(qo_indptr, paged_kv_indptr, size=len(qo_indptr))
        check_ints(paged_kv_last_page_len, size=len(qo_indptr) - 1)
        check_ints(paged_kv_indices, size=int(paged_kv_indptr[-1]))
        rows = int(qo_indptr[-1])
        if self._use_cuda_graph:
            self._max_rows = rows if self._max_rows is None else self._max_rows
            assert rows <= self._max_rows
        self._rows, self._page = rows, page_size
        assert custom_mask is None, "to pack it, flashinfer waits for the device"
        assert seq_lens is not None, "lengths that flashinfer works out by itself it copies from pageable memory"
        self._keep("_starts", qo_indptr)
        self._keep("_indptr", paged_kv_indptr)
        self._keep("_last", paged_kv_last_page_len)
        self._keep("_indices", paged_kv_indices, len(paged_kv_indices))
        self._has_mask = packed_custom_mask is not None
        self._takes_masks = self._has_mask if self._takes_masks is None else self._takes_masks
        assert self._takes_masks or not self._has_mask, (
            "on Hopper, the kernels of a first plan without a mask take none"
        )
        if self._has_mask:
            lens = _lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
            bits = [int(qo_indptr[i + 1] - qo_indptr[i]) * length for i, length in enumerate(lens)]
            assert packed_custom_mask.dtype == torch.uint8
            assert packed_custom_mask.shape == (sum(-(-each // 8) for each in bits),)
            self._keep("_mask", packed_custom_mask, len(packed_custom_mask))
            with opaque():  # flashinfer's own copy, from pageable memory: in bits, though its kernels read bytes
                self._keep("_mask_indptr_buf", torch.tensor(np.cumsum([0, *bits]).astype(np.int32)))
        self._dtypes = (q_data_type, kv_data_type or q_data_type)
        self._options = {key: arguments[key] for key in ("sm_scale", "window_left", "logits_soft_cap", "causal")}
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.standins.note("prefill_plan", self._options)

    def _unpack(self, lens):
        if not self._has_mask:
            return None
        masks = []
        for request, length in enumerate(lens):
            packed = self._mask[self._mask_indptr_buf[request] : self._mask_indptr_buf[request + 1]].numpy()
            size = int(self._starts[request + 1] - self._starts[request]) * length
            masks.append(torch.from_numpy(np.unpackbits(packed, bitorder="little")[:size].astype(bool)))
        return masks

    @opaque()
    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        self.standins.enter("prefill_run", locals(), self._workspace)
        assert q.shape[0] == self._rows
        assert (q.dtype, paged_kv_cache[0].dtype) == self._dtypes
        assert (*q.shape[1:], paged_kv_cache[0].shape[2]) == (self._heads[0], self._heads[2], self._heads[1])
        lens = _lens_of(self._indptr, self._last, self._page)
        options = {**self._options, "sm_scale": self._options["sm_scale"] * (k_scale or 1.0)}
        starts = self._starts.tolist()
        indptr = self._indptr.tolist()
        result = self._run(q, paged_kv_cache, starts, lens, indptr, self._indices, options, self._unpack(lens))
        return result * (v_scale or 1.0)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """flashinfer's wrapper for one query per request."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        self.standins.tensor_cores.append(use_tensor_cores)
        self._workspace = float_workspace_buffer
        self._use_cuda_graph = use_cuda_graph
        self._indptr = paged_kv_indptr_buffer
        self._indices = paged_kv_indices_buffer
        self._last = paged_kv_last_page_len_buffer

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ):  # fmt: skip
        assert not deprecated_positional_args
        assert set(kwargs) <= DECODE_PLAN_OPTIONS
        check_ints(indptr, size=len(last_page_len) + 1)
        check_ints(last_page_len, size=len(last_page_len))
        check_ints(indices, size=int(indptr[-1]))
        self._page = page_size
        self._keep("_indptr", indptr)
        self._keep("_last", last_page_len)
        self._keep("_indices", indices, len(indices))
        self._dtypes = (kwargs["q_data_type"], kwargs["kv_data_type"])
        self._options = {key: kwargs[key] for key in ("sm_scale", "window_left", "logits_soft_cap")}
        self.standins.note("decode_plan", self._options)

    @opaque()
    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        self.standins.enter("decode_run", locals(), self._workspace)
        lens = _lens_of(self._indptr, self._last, self._page)
        assert q.shape[0] == len(lens)
        assert (q.dtype, paged_kv_cache[0].dtype) == self._dtypes
        options = {**self._options, "sm_scale": self._options["sm_scale"] * (k_scale or 1.0)}
        starts = list(range(len(lens) + 1))
        result = self._run(q, paged_kv_cache, starts, lens, self._indptr.tolist(), self._indices, options)
        return result * (v_scale or 1.0)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """flashinfer's wrapper for absorbed latent attention."""

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        self._workspace = float_workspace_buffer
        self._use_cuda_graph = use_cuda_graph
        self._starts = qo_indptr
        self._indptr = kv_indptr
        self._indices = kv_indices
        self._lens = kv_len_arr

    def plan(
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
        head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
        use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None,
        query_layout=None, kv_cache_layout=None, lse_mode="none", output_dtype=None, output_scale="none",
        scale_mode="default", skip_softmax=False, enable_pdl=None, use_sinks=False,
    ):  # fmt: skip
        check_ints(qo_indptr, kv_indptr, size=len(kv_len_arr) + 1)
        check_ints(kv_len_arr, size=len(kv_len_arr))
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        self._keep("_starts", qo_indptr)
        self._keep("_indptr", kv_indptr)
        self._keep("_indices", kv_indices, len(kv_indices))
        self._keep("_lens", kv_len_arr)
        self._options = {"sm_scale": sm_scale, "causal": causal}
        self._page = page_size
        self.standins.note("mla_plan", self._options)

    @opaque()
    def run(
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
        kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
        skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        self.standins.enter("mla_run", locals(), self._workspace)
        assert q_nope.is_contiguous()
        assert q_pe.is_contiguous()
        assert ckv_cache.shape[1:] == (self._page, 512)
        assert kpe_cache.shape[1:] == (self._page, 64)
        query = torch.cat((q_nope, q_pe), dim=-1)
        rows = torch.cat((ckv_cache, kpe_cache), dim=-1)[:, :, None]
        starts, lens = self._starts.tolist(), self._lens.tolist()
        return self._run(query, (rows, ckv_cache[:, :, None]), starts, lens, self._indptr.tolist(), self._indices,
                         self._options)  # fmt: skip


# -- fused experts -----------------------------------------------------------------------------------------------------


def cutlass_fused_moe(
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
    quant_scales, ep_size=1, ep_rank=0, output=None, use_fused_finalize=True,
):  # fmt: skip
    """Computes from what it is given, in a plain loop; checks what the kernel's binding checks."""
    tokens, hidden = input.shape
    held, twice_intermediate, _ = fc1_expert_weights.shape
    assert not use_fused_finalize, "adds with atomics"
    assert (token_selected_experts.dtype, token_final_scales.dtype) == (torch.int32, torch.float32)
    assert token_selected_experts.shape == token_final_scales.shape
    assert input.dtype == fc1_expert_weights.dtype == fc2_expert_weights.dtype == output_dtype == output.dtype
    assert fc2_expert_weights.shape == (held, hidden, twice_intermediate // 2)
    assert tokens, "no kernel runs over nothing"
    assert not quant_scales
    for tensor in (input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output):
        assert tensor.is_contiguous()
    assert output.shape == input.shape
    first = ep_rank * held
    result = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, ids in enumerate(token_selected_experts.tolist()):
        for choice, expert in enumerate(ids):
            if first <= expert < first + held:
                up, gate = (fc1_expert_weights[expert - first].double() @ input[token].double()).chunk(2)
                y = fc2_expert_weights[expert - first].double() @ (F.silu(gate) * up)
                result[token] += token_final_scales[token, choice].item() * y
    output.copy_(result)
    return output
