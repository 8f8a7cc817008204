"""Lists the pages of a batch's requests one after the other, as flashinfer takes them, in one launch.

    program (r, part)    copies a block of request r's pages; it counts the pages of the requests before r by itself

So the host computes no offsets, and nothing is copied to the device. `attention.backends.flashinfer.pages` has the
reference.
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # pages that one program copies


@jit("indices", "table", "table_stride", "query_start_loc", "seq_lens")
def _list_pages_kernel(
    indices: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request, part = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, REQUESTS)
    counted = others <= request
    start = tl.load(query_start_loc + others, mask=counted, other=0)
    new = tl.load(query_start_loc + others + 1, mask=counted, other=0) - start
    length = tl.load(seq_lens + others, mask=counted, other=0)
    length = tl.where(new > 0, length - new + QUERIES, QUERIES) if QUERIES else tl.where(new > 0, length, 0)
    pages = tl.where(counted, (length + PAGE - 1) // PAGE, 0)
    before = tl.sum(tl.where(others < request, pages, 0), 0)
    own = tl.sum(tl.where(others == request, pages, 0), 0)
    place = part * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table + request.to(tl.int64) * table_stride + place, mask=place < own, other=0)
    tl.store(indices + before + place, page, mask=place < own)


def list_pages(
    indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    most_pages: int,
    padded_queries: int = 0,
) -> None:
    """Write every request's pages, in order; nothing is allocated.

    Args:
        indices: `[pages of all requests]` int32; written.
        block_table: `[R, blocks]` int32; entries past a request's pages are not read.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        most_pages: the most pages of one request.
        padded_queries: list the pages for this many queries behind each request's prefix; a request without queries
            counts as this many tokens. 0 lists each request's real pages, and none for requests without queries.
    """
    num_reqs = seq_lens.shape[0]
    block = min(power_of_2(most_pages), _MAX_BLOCK)
    table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    _list_pages_kernel[num_reqs, cdiv(most_pages, block)](
        indices,
        table,
        table.stride(0),
        query_start_loc,
        seq_lens,
        QUERIES=padded_queries,
        PAGE=block_size,
        REQUESTS=power_of_2(num_reqs),
        BLOCK=block,
    )
