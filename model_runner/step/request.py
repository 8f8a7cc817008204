"""A request during generation, and its share of one step.

A request's tokens are prompt and output in one list. `num_computed_tokens` of them are in the KV cache; a step runs the
next ones: a whole prompt, a chunk of it, or the last generated token. If a step reaches the end of the list, it samples
the next token. The last token may be `PENDING_TOKEN`: an earlier step sampled it on the device, and the host does not
know it yet.

`RequestMemory` assigns rows of the request table and KV blocks to requests, and releases them.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attention import BlockAllocator, KVCache, KVCacheExhausted, RequestToTokenTable
from model_runner.errors import RequestError
from model_runner.sampling.rows import TokenGrammar, fresh_seed, uniform
from model_runner.sampling.sampling_params import SamplingParams

PENDING_TOKEN = -1
"""A token that was sampled on the device and is not known on the host yet; see `FutureMap`."""

_DRAFTING, _ACCEPTING = 0x64726166745F746B, 0x6163636570745F64
"""Derive separate random sequences from a request's seed."""


@dataclass(eq=False)
class Request:
    """One sequence during generation. The scheduler owns it; the runner only reads it.

    Attributes:
        request_id: its name in errors.
        token_ids: prompt, then output so far; the last may be `PENDING_TOKEN`.
        params: sampling parameters.
        num_prompt_tokens: number of prompt tokens in `token_ids`.
        num_computed_tokens: number of `token_ids` in the KV cache.
        row: its row of the block table; None while it waits.
        grammar: the state of `params.grammar`, only this request's; None without one.
    """

    request_id: int | str
    token_ids: list[int]
    params: SamplingParams
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    row: int | None = None
    grammar: TokenGrammar | None = None
    _seed: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self._seed = fresh_seed() if self.params.seed is None else self.params.seed

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps must run; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far, including a pending one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @cached_property
    def prompt_vocabulary(self) -> Tensor:
        """The different tokens of the prompt, sorted, int64 on the host. The prompt never changes."""
        return torch.tensor(sorted(set(self.token_ids[: self.num_prompt_tokens])), dtype=torch.int64)

    def grammar_after(self, length: int) -> TokenGrammar:
        """Its grammar, once it has taken in the output among the first `length` tokens.

        Raises:
            RequestError: it has none, or one of these tokens is not known yet.
        """
        grammar = self.grammar
        if grammar is None:
            raise RequestError(
                f"request {self.request_id!r} has the text of a grammar, and nothing that follows its tokens. Only an "
                f"engine (`serving`) makes that; remove `grammar` from the parameters.",
                param="grammar",
            )
        new = self.token_ids[self.num_prompt_tokens + grammar.num_tokens : length]
        if new:
            if PENDING_TOKEN in new:
                raise RequestError(
                    f"request {self.request_id!r} has a grammar, but its last token is not known yet. Sample this step "
                    f"after the result of the step before."
                )
            grammar.advance(new)
        return grammar

    def draw(self, index: int) -> float:
        """The uniform number (0 to 1) for output token `index`: depends on the seed and the index only."""
        return uniform(self._seed, index)

    def draft_draw(self, index: int) -> float:
        """The random number for drafting output token `index`; independent of `draw`."""
        return uniform(self._seed ^ _DRAFTING, index)

    def accept_draw(self, index: int) -> float:
        """The random number that accepts or rejects the draft of output token `index`; independent of both others."""
        return uniform(self._seed ^ _ACCEPTING, index)

    def advance(self, num_tokens: int, token: int | None) -> None:
        """Record that a step ran `num_tokens` tokens and, if not None, sampled `token`."""
        self.num_computed_tokens += num_tokens
        if token is not None:
            self.token_ids.append(token)


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's share of one step: its next `num_tokens` tokens, and drafts after them to verify.

    Attributes:
        request: the request.
        num_tokens: number of its tokens to run.
        drafts: guesses of the tokens after its last one. If any share of a step has drafts, all have equally many,
            and `num_tokens` is 1.
        parents: for each draft the node it follows: 0 is the last known token (the root), `j + 1` is draft `j`, an
            earlier one. None is a chain. The trees of a step may differ.
        draft_probs: `[D, vocab]` float32 on the model's device, the distribution that each draft of a chain was drawn
            from; only with acceptance by rejection.
        restore: snapshot of recurrent states that the request begins with; its number in the runner's pool.
        keep: snapshot that gets the request's recurrent states after the step; not for a share with drafts.
    """

    request: Request
    num_tokens: int
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    draft_probs: Tensor | None = None
    restore: int | None = None
    keep: int | None = None

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the request's tokens, and so samples the next one."""
        return self.num_tokens == self.request.num_uncomputed_tokens


class RequestMemory:
    """The part of a runner that gives requests a row of the request table and KV blocks."""

    request_table: RequestToTokenTable
    allocator: BlockAllocator
    kv_cache: KVCache
    max_model_len: int

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self.allocator.num_free * self.request_table.block_size

    def admit(self, request: Request, num_tokens: int) -> None:
        """Give a request a row of the request table, and KV blocks for its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: no row or too few blocks are free; nothing is changed.
        """
        blocks_for = self.kv_cache.spec.blocks_for
        needed, longest = blocks_for(num_tokens), blocks_for(self.max_model_len)
        if needed > longest:
            raise KVCacheExhausted(
                f"request {request.request_id!r} needs {needed} KV blocks; {longest} hold the longest sequence "
                f"({self.max_model_len} tokens)."
            )
        blocks = self.allocator.allocate(needed)
        try:
            request.row = self.request_table.add_row()
        except KVCacheExhausted:
            self.allocator.free(blocks)
            raise
        self.request_table.append(request.row, blocks)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Extend an admitted request's KV blocks to hold its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: too few blocks are free; nothing is changed.
        """
        if request.row is None:
            self.admit(request, num_tokens)
            return
        more = self.kv_cache.spec.blocks_for(num_tokens) - len(self.request_table.blocks(request.row))
        if more > 0:
            self.request_table.append(request.row, self.allocator.allocate(more))

    def release(self, request: Request) -> None:
        """Release a request's row and KV blocks; if it runs again, its tokens are computed again."""
        if request.row is not None:
            self.allocator.free(self.request_table.remove_row(request.row))
            request.row = None
            request.num_computed_tokens = 0
