"""A step's tokens, flattened, on the host and on the device: built from the requests' state at that moment.

The drafts that a verify step runs after each request's last token: a chain or a tree, and its layout in the batch.

    rows of a request  last token (the root), draft 1, ..., draft D
    a row's token      the model's token after this row's draft, given the drafts on its path
    accepted           drafts from the root on, as long as each equals the token of its parent's row
    new tokens         the accepted drafts, and the token of the last accepted one's row: 1 to D + 1

`model_runner.speculation` has the acceptance. After a step the keys and values of accepted drafts are moved to
the slots of their positions: node i was written to position prefix + i. In a chain they are there already.

The layout:

    node 0             the last known token, the root; node j + 1 is draft j
    rows               root and nodes of request r are rows r * N to (r + 1) * N of the batch, N = D + 1
    positions          prefix + depth: siblings have the same position
    slots              node i is written to the slot of position prefix + i, so every node has its own
    mask               a node sees the prefix, its ancestors and itself
    links              index of each node's first child and next sibling

A chain is a tree in which every draft follows the previous one. Causal attention is correct for it, so a step with only
chains has no mask.

Source: SpecInfer (2023), EAGLE-2 (2024); the layout of the links is SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attention import (
    CacheSpec,
    CommonAttentionMetadata,
    KVCacheExhausted,
    RequestToTokenTable,
    SpecVerifyInput,
    reads_of_later_writes,
)
from model_runner.errors import RequestError
from model_runner.step.logprobs import PromptSpan
from model_runner.step.request import PENDING_TOKEN, Request, ScheduledRequest
from model_runner.step.step import Step
from ubatch import ForwardMode
from ubatch.streams import to_device

_NONE = -1


def drafts_per_request(shares: Sequence[ScheduledRequest]) -> int:
    """Number of drafts of every share; 0 for a step without drafts.

    Raises:
        RequestError: the numbers differ, a share with drafts is not a decode, or its drafts are no tree.
    """
    if not any(share.drafts for share in shares):
        return 0
    counts = {len(share.drafts) for share in shares}
    if len(counts) > 1:
        raise RequestError(f"the shares of a verify step have {sorted(counts)} drafts; all must have equally many.")
    for share in shares:
        if share.num_tokens != 1 or not share.samples:
            raise RequestError(
                f"request {share.request.request_id!r} has drafts, {share.num_tokens} tokens in this step and "
                f"{share.request.num_uncomputed_tokens} to run; drafts need exactly one of each."
            )
        if min(share.drafts) < 0:
            raise RequestError(f"request {share.request.request_id!r} has draft {min(share.drafts)}; it is no token.")
        if share.parents is not None:
            check_parents(share.request.request_id, share.parents, len(share.drafts))
    return counts.pop()


def check_parents(name: int | str, parents: Sequence[int], num_drafts: int) -> None:
    """Check that the drafts of a request form a tree, parents before children."""
    if len(parents) != num_drafts:
        raise RequestError(
            f"request {name!r} has {num_drafts} drafts and the parents of {len(parents)}; every draft has one."
        )
    for draft, parent in enumerate(parents):
        if not 0 <= parent <= draft:
            raise RequestError(
                f"request {name!r}: draft {draft} has node {parent} for a parent; it must be 0 (the last known token) "
                f"or a draft before it, node 1 to {draft}."
            )


def path_to(node: int, parents: Sequence[int] | None) -> tuple[int, ...]:
    """Indices of the drafts on the path from the root to `node`; the last is `node - 1`. Empty for the root."""
    if parents is None:
        return tuple(range(node))
    path = []
    while node:
        path.append(node - 1)
        node = parents[node - 1]
    return tuple(reversed(path))


@dataclass(frozen=True)
class DraftTrees:
    """The trees of a step, on the host; all have `N` nodes.

    Attributes:
        depth: `[R, N]` int64, 0 for the root.
        first_child: `[R, N]` int64, -1 for none.
        next_sibling: `[R, N]` int64, -1 for none.
        sees: `[R, N, N]` bool, whether the first node sees the second: itself, or an ancestor.
    """

    depth: Tensor
    first_child: Tensor
    next_sibling: Tensor
    sees: Tensor

    @classmethod
    def of(
        cls, parents: Sequence[tuple[int, ...] | None], num_drafts: int, *, chains: bool = False
    ) -> DraftTrees | None:
        """The trees of a step whose requests have `num_drafts` drafts each; None if all of them are chains, unless
        those count as trees (`chains`)."""
        chain = tuple(range(num_drafts))
        trees = [chain if each is None else tuple(each) for each in parents]
        if not chains and all(tree == chain for tree in trees):
            return None
        grown = [_grow(tree) for tree in trees]
        return cls(*(torch.stack(parts) for parts in zip(*grown, strict=True)))

    def positions(self, prefix_lens: Sequence[int]) -> Tensor:
        """Every node's position in its request if its path is accepted, `[R * N]` int64."""
        return (torch.tensor(prefix_lens, dtype=torch.int64)[:, None] + self.depth).flatten()

    def verify_input(self, prefix_lens: Sequence[int], input_ids: Tensor, positions: Tensor) -> SpecVerifyInput:
        """The attention input of a verify step with these trees.

        Args:
            prefix_lens: tokens of each request in the cache.
            input_ids: `[R * N]` int64, on the device.
        """
        requests, nodes = self.depth.shape
        index = torch.arange(requests * nodes).view(requests, nodes)
        rows = [prefix + nodes for prefix in prefix_lens]  # entries of a node's row of the mask
        starts = [0, *accumulate(row * nodes for row in rows)]
        ends = torch.tensor([[start + prefix for start, prefix in zip(starts, prefix_lens, strict=False)], rows])
        host = (index, self.first_child, self.next_sibling, ends, self.sees)
        index, child, sibling, ends, sees = to_device(host, input_ids.device)
        # Every node sees the whole prefix. The tree's part of the mask is at the end of each row.
        mask = torch.ones(starts[-1], dtype=torch.bool, device=input_ids.device)
        node = torch.arange(nodes, device=input_ids.device)
        where = ends[0][:, None, None] + ends[1][:, None, None] * node[:, None] + node
        mask.index_copy_(0, where.flatten(), sees.flatten())
        return SpecVerifyInput(nodes, tuple(prefix_lens), input_ids, positions, mask, index, child, sibling)


def chain_of_drafts(
    num_drafts: int, prefix_lens: Sequence[int], input_ids: Tensor, positions: Tensor
) -> SpecVerifyInput:
    """The verify input of drafts that follow each other: plain causal attention, no mask.

    Args:
        num_drafts: `D` of every request; the last known token is the root of the chain.
        prefix_lens: tokens of each request in the cache.
        input_ids: `[R * (D + 1)]` int64.
        positions: `[R * (D + 1)]` int64.
    """
    requests, nodes = len(prefix_lens), num_drafts + 1
    index = torch.arange(requests * nodes).view(requests, nodes)
    child = torch.tensor([*range(1, nodes), _NONE]).repeat(requests, 1)
    links = to_device((index, child, torch.full_like(child, _NONE)), input_ids.device)
    return SpecVerifyInput(nodes, tuple(prefix_lens), input_ids, positions, None, *links)


@lru_cache(maxsize=1024)
def _grow(parents: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One tree's `depth`, `first_child`, `next_sibling` and `sees`; they are cached, so do not write to them."""
    nodes = len(parents) + 1
    depth, child, sibling = [0] * nodes, [_NONE] * nodes, [_NONE] * nodes
    last_child = [_NONE] * nodes
    sees = [[False] * nodes for _ in range(nodes)]
    sees[0][0] = True
    for node, parent in enumerate(parents, 1):
        depth[node] = depth[parent] + 1
        sees[node] = sees[parent].copy()
        sees[node][node] = True
        if last_child[parent] == _NONE:
            child[parent] = node
        else:
            sibling[last_child[parent]] = node
        last_child[parent] = node
    return torch.tensor(depth), torch.tensor(child), torch.tensor(sibling), torch.tensor(sees)


def build_input_batch(
    scheduled: Step | Sequence[ScheduledRequest],
    table: RequestToTokenTable,
    spec: CacheSpec,
    device: torch.device | str = "cpu",
    *,
    mask_chains: bool = False,
) -> Step:
    """Flatten the requests' next tokens, and their drafts; returns the step with its batch.

    Args:
        scheduled: a step, or its shares; without shares it is idle.
        table: block table of every request.
        spec: spec of the KV cache.
        device: device of the tensors.
        mask_chains: also give chains of drafts a mask, because graphs that verify trees need one.

    Raises:
        RequestError: a share is empty or longer than the rest of its request; a request has no row; shares have
            different numbers of drafts; drafts are no tree, or follow a pending token.
        KVCacheExhausted: a request has too few blocks for its share.
    """
    step, device = scheduled if isinstance(scheduled, Step) else Step.of(scheduled), torch.device(device)
    shares, query_lens, computed = step.shares, step.query_lens, step.prefix_lens
    num_drafts = 0 if step.mode is not ForwardMode.TARGET_VERIFY else drafts_per_request(shares)
    seq_lens = list(map(int.__add__, computed, query_lens))
    rows = _checked_rows(step, seq_lens, table)
    starts = [0, *accumulate(query_lens)]

    positions, slots = _places(table, rows, query_lens, computed)
    trees = None
    if num_drafts:
        trees = DraftTrees.of([share.parents for share in shares], num_drafts, chains=mask_chains)
    if trees is not None:
        positions = trees.positions(computed)
    pages = table.page_table(rows)
    ids, pending = _input_ids(shares, computed)
    lengths = [len(share.request.token_ids) for share in shares]
    owners: list[tuple[Request, int, int]] = []
    if num_drafts:
        rows_per_share = [num_drafts + 1] * len(shares)
        sampled_rows = list(range(starts[-1]))
    else:
        rows_per_share = [int(end == length) for end, length in zip(seq_lens, lengths, strict=True)]
        sampled_rows = [stop - 1 for stop, samples in zip(starts[1:], rows_per_share, strict=True) if samples]
        everyone = zip(shares, lengths, rows, rows_per_share, strict=True)
        owners = [(share.request, length, row) for share, length, row, samples in everyone if samples]

    future_places = [row + 1 for _, _, row in owners]
    host = [torch.tensor(values, dtype=torch.int64) for values in (ids, sampled_rows, future_places)]
    host += [torch.tensor(values, dtype=torch.int32) for values in (starts, seq_lens)]
    on_device = to_device((*host, positions, pages, slots), device)
    input_ids, logits_rows, places, query_start_loc, lens, positions, table_on_device, slots = on_device
    drafts: SpecVerifyInput | None = None
    if num_drafts:
        if trees is None:
            drafts = chain_of_drafts(num_drafts, computed, input_ids, positions)
        else:
            drafts = trees.verify_input(computed, input_ids, positions)

    def late_reads() -> Sequence[tuple[int, int]]:
        if not table.writes_shared(rows, computed, seq_lens):
            return ()
        return reads_of_later_writes(query_lens, seq_lens, pages, spec.block_size)

    return replace(
        step,
        input_ids=input_ids,
        positions=positions,
        metadata=CommonAttentionMetadata.build(
            query_lens, seq_lens, table_on_device, slots, step.mode, drafts, (query_start_loc, lens), rows
        ),
        logits_rows=logits_rows,
        future_places=places,
        lengths=tuple(lengths),
        rows_per_share=tuple(rows_per_share),
        logits_rows_cpu=tuple(sampled_rows),
        future_owners=tuple(owners),
        pending=pending,
        prompt_spans=_prompt_spans(shares, starts),
        late_reads=late_reads,
    )


def _places(
    table: RequestToTokenTable, rows: Sequence[int], query_lens: Sequence[int], computed: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Every token's position in its request, and its KV slot, `[T]` each."""
    row_of_request = torch.tensor(rows, dtype=torch.int64)
    done = torch.tensor(computed, dtype=torch.int64)
    num_tokens = sum(query_lens)
    if num_tokens == len(rows):  # one each
        return done, table.slots(row_of_request, done)
    lengths = torch.tensor(query_lens, dtype=torch.int64)
    owner = torch.repeat_interleave(lengths)
    positions = torch.arange(num_tokens) + (done - lengths.cumsum(0) + lengths)[owner]
    return positions, table.slots(row_of_request[owner], positions)


def _input_ids(
    shares: Sequence[ScheduledRequest], computed: Sequence[int]
) -> tuple[list[int], tuple[tuple[Request, int, int], ...]]:
    """The tokens of all shares, with `-(row + 1)` for pending ones; and the list of pending ones."""
    ids: list[int] = []
    pending = []
    for share, start in zip(shares, computed, strict=True):
        request = share.request
        if share.num_tokens == 1:
            ids.append(request.token_ids[start])
        else:
            ids += request.token_ids[start : start + share.num_tokens]
        if ids[-1] == PENDING_TOKEN and request.row is not None:
            if share.drafts:
                raise RequestError(f"request {request.request_id!r} has drafts behind a token that is not known yet.")
            ids[-1] = -(request.row + 1)
            pending.append((request, start + share.num_tokens - 1, request.row))
        ids += share.drafts
    return ids, tuple(pending)


def _prompt_spans(shares: Sequence[ScheduledRequest], starts: Sequence[int]) -> tuple[PromptSpan, ...]:
    spans = []
    for index, share in enumerate(shares):
        request = share.request
        if request.params.prompt_logprobs is None or request.num_computed_tokens >= request.num_prompt_tokens:
            continue
        start, end = request.num_computed_tokens, request.num_prompt_tokens
        stop = min(start + share.num_tokens, end)
        # If the prompt continues, one token more: this chunk's last row scores the next chunk's first token.
        targets = tuple(request.token_ids[start + 1 : min(stop + 1, end)])
        spans.append(PromptSpan(index, request, start, stop, starts[index], targets))
    return tuple(spans)


def _checked_rows(step: Step, seq_lens: Sequence[int], table: RequestToTokenTable) -> list[int]:
    """The row of each request, which has blocks for its share."""
    rows = []
    for share, computed in zip(step.shares, step.prefix_lens, strict=True):
        request = share.request
        if not 1 <= share.num_tokens <= len(request.token_ids) - computed:
            raise RequestError(
                f"request {request.request_id!r}: {share.num_tokens} tokens were scheduled, "
                f"it has {request.num_uncomputed_tokens} to run."
            )
        if request.row is None:
            raise RequestError(f"request {request.request_id!r} has no row in the block table; admit it first.")
        rows.append(request.row)
    for share, needed, room in zip(step.shares, seq_lens, table.room(rows), strict=True):
        if needed > room:
            raise KVCacheExhausted(
                f"request {share.request.request_id!r} has KV blocks for {room} tokens and needs {needed}; reserve "
                "them first."
            )
    return rows
