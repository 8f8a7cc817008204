"""Shared by the back ends on flashinfer's kernels: finding a kernel, workspaces, and a batch as the kernels take it.

flashinfer is imported when a back end is made, and only here. Its kernels differ between versions and between GPU
architectures; a back end looks each kernel up by name, and making the back end fails if one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attention.interface import MLAShape
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, import_optional
from ubatch.streams import to_device


class FlashInferKernel(StrEnum):
    """The parts of flashinfer that are used, each as `"module:attribute"`."""

    TRTLLM_DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
    TRTLLM_CONTEXT = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
    TRTLLM_MLA_DECODE = "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla"
    TRTLLM_RAGGED = "flashinfer.prefill:trtllm_ragged_attention_deepseek"
    MLA_ROPE_QUANTIZE = "flashinfer.rope:mla_rope_quantize_fp8"
    PREFILL_WRAPPER = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
    DECODE_WRAPPER = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"
    MLA_WRAPPER = "flashinfer.mla:BatchMLAPagedAttentionWrapper"


def find_kernel(kernel: FlashInferKernel) -> Callable[..., Any]:
    """Import a function or class of flashinfer. Tests replace this function to supply stand-ins.

    Raises:
        ConfigError: flashinfer cannot be imported, or this version lacks the function or class.
    """
    module, _, attribute = kernel.value.partition(":")
    imported = import_optional(
        module,
        "Install flashinfer-python, and flashinfer-cubin in the same version if at all, or choose another attention "
        "back end.",
    )
    try:
        found: Callable[..., Any] = getattr(imported, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"the installed flashinfer has no {module}.{attribute}. Install flashinfer-python 0.6 or later, or choose "
            "another attention back end."
        ) from error
    return found


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The GPU's architecture, such as (10, 0); None on a CPU, where stand-ins compute."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def refuse_gpu(
    name: str, device: torch.device, served: Callable[[tuple[int, int]], bool], needed: str, instead: str
) -> None:
    """Refuse GPUs that a back end's kernels do not run on.

    Args:
        served: whether they run on an architecture.
        needed, instead: GPUs, and other back ends, in words.

    Raises:
        ConfigError: they do not run on this one.
    """
    capability = compute_capability(device)
    if capability is not None and not served(capability):
        raise ConfigError(
            f"attention back end {name!r} needs a GPU of {needed}, this is SM{capability[0]}{capability[1]}. "
            f"Choose {instead}."
        )


def refuse_tree_mask(name: str, metadata: CommonAttentionMetadata) -> None:
    """Refuse a tree of drafts, for kernels that take no mask; a chain needs none.

    Raises:
        ConfigError: the batch has a custom mask.
    """
    if metadata.has_tree:
        raise ConfigError(
            f"attention back end {name!r} takes no tree mask. Draft a chain (one candidate per position), or choose "
            "'flashinfer', 'triton' or 'torch' where they have one."
        )


class Workspace:
    """Scratch memory of one back end object.

    Kernels keep counters in it: it must be zero before their first run, and they leave the counters at zero. So two
    lanes, whose kernels may run at once, must never share it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._memory: Tensor | None = None

    @torch.inference_mode(False)
    def get(self) -> Tensor:
        """`[num_bytes]` uint8; allocated and zeroed on the first call, the same tensor on later ones."""
        if self._memory is None:
            self._memory = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return 0 if self._memory is None else self._memory.nbytes


@dataclass(frozen=True)
class RequestBatch:
    """The requests of a batch that have queries, as kernels take them. Their tokens are the batch's first rows.

    Attributes:
        query_lens: tokens of each request in this step, on the host, all at least 1.
        lens: total tokens of each request, on the host.
        seq_lens: the same on the device, `[n]` int32.
        block_table: `[n, blocks]` int32, contiguous; entries past a request's length are 0, a valid block.
    """

    query_lens: tuple[int, ...]
    lens: tuple[int, ...]
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, block_size: int) -> RequestBatch:
        """The requests of `metadata`, padding requests left out.

        Kernels load whole tiles of a table, so every entry must be a valid block, even one that is masked later.
        """
        queries = metadata.query_lens_cpu
        active = [row for row, length in enumerate(queries) if length]
        seq_lens, table = metadata.seq_lens, metadata.block_table
        if len(active) < metadata.num_reqs:
            (rows,) = to_device((torch.tensor(active, dtype=torch.int64),), seq_lens.device)
            seq_lens, table = seq_lens.index_select(0, rows), table.index_select(0, rows)
        num_blocks = (seq_lens + (block_size - 1)).floor_divide(block_size)
        inside = torch.arange(table.shape[1], device=table.device) < num_blocks[:, None]
        return cls(
            query_lens=tuple(queries[row] for row in active),
            lens=tuple(metadata.seq_lens_cpu[row] for row in active),
            seq_lens=seq_lens.contiguous(),
            block_table=torch.where(inside, table, 0),
        )

    def select(self, members: Sequence[int]) -> RequestBatch:
        """Some of the requests, in order."""
        if len(members) == self.num_reqs:
            return self
        (rows,) = to_device((torch.tensor(tuple(members), dtype=torch.int64),), self.seq_lens.device)
        return RequestBatch(
            query_lens=tuple(self.query_lens[member] for member in members),
            lens=tuple(self.lens[member] for member in members),
            seq_lens=self.seq_lens.index_select(0, rows),
            block_table=self.block_table.index_select(0, rows),
        )

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.query_lens)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of each request that were in the cache before this step."""
        return tuple(length - new for length, new in zip(self.lens, self.query_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests in this step."""
        return sum(self.query_lens)

    def query_start_loc(self) -> Tensor:
        """`[n + 1]` int32 on the device, where each request's tokens start."""
        starts = torch.tensor((0, *accumulate(self.query_lens)), dtype=torch.int32)
        return to_device((starts,), self.seq_lens.device)[0]


def ragged_positions(lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """For every item of concatenated sequences: the index of its sequence, and its place in the sequence.

    Args:
        lens: lengths of the sequences.

    Returns:
        Two tensors `[sum(lens)]` int64. The host knows all sizes, so nothing waits for the device.
    """
    (counts,) = to_device((torch.tensor(tuple(lens), dtype=torch.int64),), device)
    owner = torch.repeat_interleave(counts, output_size=sum(lens))
    starts = counts.cumsum(0).sub_(counts)
    place = torch.arange(sum(lens), device=device).sub_(starts.index_select(0, owner))
    return owner, place


def rows_of(lens: Sequence[int], members: Sequence[int], device: torch.device) -> slice | Tensor:
    """Rows of the selected sequences among concatenated ones: a slice if they are contiguous, else an index.

    Args:
        lens: lengths of all sequences.
        members: the selected sequences, in order, at least one.
    """
    starts = (0, *accumulate(lens))
    first, last = members[0], members[-1]
    if last - first + 1 == len(members):
        return slice(starts[first], starts[last + 1])
    owner, place = ragged_positions([lens[member] for member in members], device)
    (first_items,) = to_device((torch.tensor([starts[member] for member in members]),), device)
    return place.add_(first_items.index_select(0, owner))


def pad_rows(out: Tensor, num_rows: int) -> Tensor:
    """`out` `[n, ...]` with rows of zeros appended, `[num_rows, ...]`; returned unchanged if `n` is `num_rows`."""
    if out.shape[0] == num_rows:
        return out
    padded = out.new_zeros(num_rows, *out.shape[1:])
    padded[: out.shape[0]] = out
    return padded


def absorb(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Project queries `[n, heads, nope]` into the latent space: `[n, heads, kv_lora_rank]`."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def project_latents(attended: Tensor, w_uv: Tensor) -> Tensor:
    """Project the output of absorbed attention, `[n, heads, kv_lora_rank]`, to `[n, heads, v_head_dim]`, contiguous."""
    return torch.bmm(attended.to(w_uv.dtype).transpose(0, 1), w_uv).transpose(0, 1).contiguous()


def refuse_mla_shape(name: str, shape: MLAShape) -> None:
    """Refuse latents that the kernels are not compiled for.

    Raises:
        ConfigError: the latent has not 512 elements, or its rotated part not 64.
    """
    if (shape.kv_lora_rank, shape.qk_rope_head_dim) != (512, 64):
        raise ConfigError(
            f"attention back end {name!r} takes latents of 512 numbers and 64 of position, not "
            f"{shape.kv_lora_rank} and {shape.qk_rope_head_dim}. Choose 'torch'."
        )
