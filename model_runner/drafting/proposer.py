"""Proposes the drafts of a draft network: first it runs the target's tokens (observe), then it drafts (propose).

    observe    runs the step's rows through the draft network, too (draft extend): all rows after prompts, chunks of
               prompts and decodes; the root and the accepted drafts after a verify step
    propose    drafts a chain or a tree from each request's last position, all requests at once
    forget     drops the request's state: the number of positions that the draft network has run

The inputs at a position depend on the network (`DraftNetwork.reads_hidden`):

    position       t - 1                        t                           t + 1
    reads hidden   hidden t - 1, token t        hidden t, token t + 1       (a draft step) estimate t + 1, draft
    reads tokens   token t - 1                  token t                     token t + 1

A network that reads hidden states can run the position of every token that the target has run: the hidden state before
a known token is known, too. A network that reads only tokens does not need the target; it runs the tokens accepted in a
verify step, together with the last one, when it drafts next, even if plain steps run in between.

Rejected drafts stay in the cache until their positions are run again, which happens before anything reads them. A
prefix from the prefix cache includes the draft network's keys and values; those of its last position may belong to
another next token. Neither changes the output, only the number of accepted drafts.

Trees of drafts are grown as in EAGLE-2 (`draft_trees`): wide where the draft network is unsure.

    level 1        the `topk` most likely tokens after the last known one
    next levels    the `topk` most likely tokens after each of the `topk` most likely nodes of the previous level
    at the end     keep the most likely nodes of all levels; a node's probability is the product along its path

A node is never more likely than its parent, so the parents of kept nodes are kept, too.

Source of trees: EAGLE-2 (Li and others, 2024), sections 4.1 and 4.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import CommonAttentionMetadata
from model_runner.drafting.network import DraftBatch, DraftNetwork
from model_runner.drafting.runner import DraftRunner, draft_extend_batch
from model_runner.errors import RequestError
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.settings import DraftShape, most_nodes
from model_runner.speculation import Draft
from model_runner.step.request import Request
from model_runner.step.step import Step
from ubatch import ConfigError, ForwardMode
from ubatch.streams import to_device


def draft_trees(
    runner: DraftRunner, batch: DraftBatch, hidden: Tensor, counts: Sequence[int], num_steps: int, topk: int
) -> list[Draft]:
    """A tree for every request.

    Args:
        hidden: `[R, hidden_size]`, input of the first level's logits.
        counts: most nodes of each request.
        topk: nodes of a level that are extended, and tokens after each.
    """
    requests = hidden.shape[0]
    chances, tokens = _best_tokens(runner, hidden, topk)
    all_chances, all_tokens = [chances], [tokens]
    all_parents = [torch.full_like(tokens, -1)]
    node = torch.arange(topk, device=hidden.device).expand(requests, -1)  # indices of the level's nodes among all nodes
    hidden = hidden.repeat_interleave(topk, dim=0)
    itself = torch.eye(topk, dtype=torch.bool, device=hidden.device).expand(requests, -1, -1)
    ancestors = itself[:, :, :0]
    for depth in range(num_steps - 1):
        ancestors = torch.cat((ancestors, itself), dim=-1)
        hidden = runner.level(batch, depth, tokens, hidden, ancestors)
        own, next_tokens = _best_tokens(runner, hidden, topk)
        behind = (chances[:, :, None] + own.view(requests, topk, topk)).flatten(1)
        next_tokens = next_tokens.view(requests, -1)
        all_chances.append(behind)
        all_tokens.append(next_tokens)
        all_parents.append(node.repeat_interleave(topk, dim=1))
        if depth == num_steps - 2:
            break
        # The most likely new nodes form the next level.
        chances, chosen = behind.topk(topk, dim=-1)
        parent = chosen // topk
        node = chosen + (most_nodes(depth + 1, topk))
        tokens = next_tokens.gather(1, chosen)
        ancestors = ancestors.gather(1, parent[:, :, None].expand(-1, -1, ancestors.shape[-1]))
        hidden = hidden.view(requests, topk, -1).gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
        hidden = hidden.flatten(0, 1)
    everything = (torch.cat(parts, dim=1) for parts in (all_chances, all_tokens, all_parents))
    kept = select_nodes(*everything, count=max(counts))
    trees = runner.read(kept)
    return [Draft(tuple(ids[:most]), tuple(parents[:most])) for (ids, parents), most in zip(trees, counts, strict=True)]


def select_nodes(chances: Tensor, tokens: Tensor, parents: Tensor, *, count: int) -> Tensor:
    """The most likely nodes of each tree, parents before children.

    Args:
        chances: `[R, nodes]`, the logarithm of each node's probability, at most its parent's.
        tokens: `[R, nodes]` int64.
        parents: `[R, nodes]` int64, the parent's index, lower than the node's own; -1 for the root.
        count: number of nodes to keep; if there are fewer, all are kept.

    Returns:
        `[R, 2, count]` int64: tokens, and parents as in `Draft.parents`.
    """
    # Among equally likely nodes the first wins, so a parent comes before its child.
    order = chances.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
    number = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(1, order.shape[1] + 1, device=tokens.device).expand_as(order)
    )
    parent = parents.gather(1, order)
    parent = torch.where(parent < 0, 0, number.gather(1, parent.clamp_min(0)))
    return torch.stack((tokens.gather(1, order), parent), dim=1)


def _best_tokens(runner: DraftRunner, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the most likely tokens, `[rows, topk]` each."""
    logits = runner.network.compute_logits(hidden).float()
    best = logits.topk(topk, dim=-1)
    return best.values - logits.logsumexp(dim=-1, keepdim=True), best.indices


class DraftProposer:
    """A `Proposer` and `StepObserver` around a draft network. Pass it to `ModelRunner.set_observer`.

    Args:
        shape: drafts of a request; trees with `topk` above 1, see `draft_trees`.

    Attributes:
        kv_cache: the draft network's KV cache.
        num_places: positions after a request's last known token that need KV slots while drafts are made or verified.

    Raises:
        ConfigError: drafts are trees, but the target's or the draft network's attention back end has no tree masks.
    """

    def __init__(self, runner: CapturingRunner, draft: DraftNetwork, shape: DraftShape) -> None:
        self._runner = runner
        self._draft = DraftRunner(runner, draft, shape)
        for attention in (runner.attention, self._draft.attention):
            if shape.topk > 1 and not attention.takes_trees:
                raise ConfigError(
                    f"attention back end {attention.decode_name!r} has no tree masks, so drafts cannot be trees (topk "
                    f"{shape.topk}). Choose another decode attention back end, or topk 1."
                )
        self._num_steps, self._topk = shape.num_steps, shape.topk
        self._reads_hidden = draft.reads_hidden
        self._shift = int(draft.reads_hidden)  # from a position to the index of the token read there
        self.num_places = shape.num_places
        self.kv_cache = self._draft.kv_cache
        # Number of positions of each request in the draft KV cache, and (`_last`) the result at the last one, by row.
        self._places: dict[Request, int] = {}
        size = (runner.request_table.num_rows, draft.config.hidden_size)
        self._last = torch.zeros(size, dtype=runner.kv_cache.spec.dtype, device=runner.device)

    # -- observing the target's steps -------------------------------------------------------------------------------

    def observe(
        self, step: Step, hidden: Tensor, tokens: Sequence[tuple[int, ...]], accepted_rows: Sequence[tuple[int, ...]]
    ) -> None:
        """Run the step's rows through the draft network; see `StepObserver`."""
        verifies = step.mode is ForwardMode.TARGET_VERIFY
        if verifies and not self._reads_hidden:
            return  # the accepted tokens are run when the next ones are drafted
        extend = draft_extend_batch(step, accepted_rows)
        ids = step.input_ids
        if verifies:
            # Root and accepted drafts; each reads the token after it, which is one of the step's output tokens.
            (ids,) = to_device([torch.tensor([token for own in tokens for token in own])], self._draft.device)
            hidden = hidden.index_select(0, extend.rows)
        elif self._reads_hidden:
            # Each row reads the next row's token; a share's last row the sampled token, or the next chunk's first.
            shares = zip(step.shares, tokens, step.metadata.seq_lens_cpu, strict=True)
            after = [own[0] if own else share.request.token_ids[end] for share, own, end in shares]
            (follows,) = to_device([torch.tensor(after)], self._draft.device)
            ids = ids.roll(-1).index_copy_(0, extend.last_rows, follows)
        result = self._draft.extend(extend.metadata, ids, extend.positions, hidden)
        requests = [share.request for share in step.shares]
        self._keep(requests, extend.metadata, result.index_select(0, extend.last_rows))

    def _keep(self, requests: Sequence[Request], extended: CommonAttentionMetadata, last: Tensor) -> None:
        """Store the result at each request's last position; a request that has ended has no row and is skipped."""
        kept = [index for index, request in enumerate(requests) if request.row is not None]
        ends, lens = extended.seq_lens_cpu, extended.query_lens_cpu
        for index in kept:
            # If earlier accepted tokens were not run yet, keep the count: `propose` runs all of them.
            if self._places.get(requests[index], ends[index]) >= ends[index] - lens[index]:
                self._places[requests[index]] = ends[index]
        if len(kept) < len(requests):
            (where,) = to_device([torch.tensor(kept, dtype=torch.int64)], last.device)
            last = last.index_select(0, where)
        if self._reads_hidden and kept:
            (rows,) = to_device([torch.tensor([requests[index].row for index in kept])], last.device)
            self._last.index_copy_(0, rows, last)

    # -- drafts -----------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Drafts of each request; none if its count is 0, or if the draft network has not run its tokens.

        Raises:
            RequestError: a request has no row: it was never admitted, or was released.
            PeerFailed, TransferTimeout, GroupBroken: another rank of the replica did not draft.
        """
        drafts = [Draft(())] * len(requests)
        ready = [index for index, request in enumerate(requests) if counts[index] > 0 and self._has_seen(request)]
        if not ready:
            return drafts
        with self._runner.together(), torch.inference_mode(), self._runner.streams.forward():
            chosen = [requests[index] for index in ready]
            batch = self._draft.batch(chosen, [request.num_tokens - self._shift for request in chosen])
            hidden = self._hidden(batch)
            wanted = [counts[index] for index in ready]
            if self._topk > 1:
                made = draft_trees(self._draft, batch, hidden, wanted, self._num_steps, self._topk)
            else:
                made = self._draft_chains(batch, hidden, wanted)
        for index, draft in zip(ready, made, strict=True):
            drafts[index] = draft
        return drafts

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._places.pop(request, None)

    def _has_seen(self, request: Request) -> bool:
        if request.row is None:
            raise RequestError(f"request {request.request_id!r} has no row in the block table; admit it first.")
        seen, wanted = self._places.get(request, 0), request.num_tokens - self._shift
        return seen == wanted if self._reads_hidden else 0 < seen < wanted

    def _hidden(self, batch: DraftBatch) -> Tensor:
        """The result at the last position of each request, `[R, hidden_size]`."""
        if self._reads_hidden:
            (rows,) = to_device([batch.rows], self._last.device)
            return self._last.index_select(0, rows)
        unseen = [request.token_ids[self._places[request] :] for request in batch.requests]
        last = self._draft.catch_up(batch, unseen, self._last)
        for request in batch.requests:
            self._places[request] = request.num_tokens
        return last

    def _draft_chains(self, batch: DraftBatch, hidden: Tensor, counts: Sequence[int]) -> list[Draft]:
        drafts, sources = self._draft.chain(batch, hidden, min(self._num_steps, max(counts)))
        made = []
        for index, (own, count) in enumerate(zip(self._draft.read(drafts), counts, strict=True)):
            greedy = batch.requests[index].params.greedy
            probs = None if sources is None or greedy else sources[index, :count]
            made.append(Draft(tuple(own[:count]), probs=probs))
        return made
