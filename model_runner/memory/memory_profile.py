"""Measures a runner's GPU memory without the KV cache, before the cache is made: the cache gets the rest.

    weights    memory held after loading the model and its draft network, with the states of linear attention
    step       additional memory of the largest steps: their tensors, workspaces of attention, and buffers of the
               transport, which may differ between prefills and decode steps. With a small cache a prefill, a verify
               and a decode step run, twice: compilation, tuning and one-time allocations happen in the first run
    graphs     free memory that graphs take. The two largest of each kind are captured, and released again: each of
               the others, which are smaller and share the pool, takes at most as much as the second one

    pages      allowed - weights - step - graphs

With several ranks all of them must measure together: steps and captures are collective.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from attention import CacheSpec
from model_runner.drafting.runner import draft_cache_spec
from model_runner.sampling.sampling_params import SamplingParams
from model_runner.settings import DeviceMemory
from model_runner.speculation import Draft, Proposer
from model_runner.step.graph_sizes import GraphShape
from model_runner.step.request import Request, ScheduledRequest
from model_runner.step_runner import StepRunner
from ubatch import ConfigError

_logger = logging.getLogger(__name__)

_WIDEST: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "logprobs": 1, "prompt_logprobs": 1}
_SAMPLED = SamplingParams(max_tokens=2, repetition_penalty=1.1, seed=0, bad_token_sequences=((1,),), **_WIDEST)
"""Sampling parameters that need the most memory: logits are copied, and the vocabulary is sorted."""

_USUAL_TOKENS = 2048
"""Tokens of the largest step, if `max_num_batched_tokens` is not given."""


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        self._trim()
        return torch.cuda.memory_reserved(self._device)

    def free(self) -> int:
        self._trim()
        return torch.cuda.mem_get_info(self._device)[0]

    def reset_peak(self) -> None:
        self._trim()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def _trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def measured_blocks(
    runner: StepRunner, spec: CacheSpec, share: float, open_cache: Callable[[int], None], memory: DeviceMemory
) -> int:
    """Blocks of the KV cache that fit in addition to everything else in a share of the device's memory. Collective.

    Args:
        runner: a runner with its model, and no cache yet.
        share: share of the memory that is free or held by this process.
        open_cache: gives the runner a cache of this number of blocks, and closes its previous one.

    Raises:
        ConfigError: not even one block fits.
    """
    own, block_bytes = runner.settings, spec.bytes_per_block
    tokens = _USUAL_TOKENS if own.max_num_batched_tokens is None else own.max_num_batched_tokens
    places = own.num_speculative_tokens if own.draft is None else own.draft.shape.num_places
    if places + 2 > runner.max_model_len:  # sequences are too short for drafts
        places = 0
    drafts = min(places, own.num_speculative_tokens)
    if runner.draft is not None:
        block_bytes += draft_cache_spec(runner.draft, spec).bytes_per_block
    weights = memory.held()
    room = blocks_beside(block_bytes, int(share * (memory.free() + weights)), weights, share)
    if runner.tensor_parallel is not None:  # the ranks of a replica run the same steps
        room = int(runner.tensor_parallel.group.least(room))
    # The cache gets at most half of the rest here: the step needs memory, too, and is no larger than the cache holds.
    requests, length = largest_step(spec, tokens, runner.max_num_seqs, runner.max_model_len, room // 2, places)
    open_cache(requests * spec.blocks_for(length + 1 + places))
    cache = runner.kv_cache.nbytes + (0 if runner.proposer is None else runner.proposer.kv_cache.nbytes)
    for _ in range(2):
        memory.reset_peak()
        _run(runner, requests, length, places, drafted=tokens // (1 + drafts) if drafts else 0, drafts=drafts)
    step = memory.peak() - weights - cache
    allowed = int(share * (memory.free() + memory.held()))
    graphs = _graphs(runner, memory)
    use = f"weights {weights}, the largest step {step}, graphs {graphs}"
    blocks = blocks_beside(block_bytes, allowed, weights + step + graphs, share, use)
    _logger.info("of %d bytes: %s, KV cache %d", allowed, use, blocks * block_bytes)
    return blocks


def blocks_beside(bytes_per_block: int, allowed: int, held: int, share: float, parts: str = "") -> int:
    """Blocks that fit in `allowed - held` bytes, without the cache's additional block for padding.

    Args:
        held: bytes used by everything except the cache.
        parts: what `held` consists of, for the message.

    Raises:
        ConfigError: not even one block fits.
    """
    blocks = (allowed - held) // bytes_per_block - 1
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {share} allows {allowed} bytes; the model takes {held}{parts and f' ({parts})'}, "
            f"and two KV blocks {2 * bytes_per_block}. Raise it, lower max_num_batched_tokens, or free memory of "
            "the GPU."
        )
    return blocks


def largest_step(
    spec: CacheSpec, tokens: int, max_num_seqs: int, max_model_len: int, num_blocks: int, places: int = 0
) -> tuple[int, int]:
    """Number and length of the prompts in the step that needs the most memory: as many prompts as may run at once.

    Args:
        max_model_len: most tokens of a prompt, its sampled token, and drafts.
        num_blocks: KV blocks that must hold all prompts.
        places: positions for drafts, after a prompt's sampled token.
    """
    requests = max(1, min(max_num_seqs, tokens, num_blocks // spec.blocks_for(2 + places)))
    held = num_blocks // requests * spec.block_size
    return requests, max(1, min(tokens // requests, min(max_model_len, held) - 1 - places))


def graphs_in_all(shapes: Iterable[GraphShape], sampled: Sequence[tuple[GraphShape, int]]) -> int:
    """Estimate of the bytes of all graphs, from a sample of captured ones.

    Args:
        sampled: in order of capture, largest first: a shape, and the bytes of its graph.
    """
    smallest = {_kind(shape): nbytes for shape, nbytes in sampled}
    left = Counter(map(_kind, shapes)) - Counter(_kind(shape) for shape, _ in sampled)
    return sum(nbytes for _, nbytes in sampled) + sum(count * smallest.get(kind, 0) for kind, count in left.items())


def _kind(shape: GraphShape) -> object:
    return shape.mode, shape.tokens_per_request, shape.lanes, shape.single


def _run(runner: StepRunner, count: int, length: int, places: int, *, drafted: int, drafts: int) -> None:
    """Run a prefill of `count` prompts of `length` tokens, each with `places` positions for drafts; then a verify step
    of `drafted` of them with `drafts` drafts each, if any; then a decode step."""
    proposer = runner.proposer
    requests = [Request(number, [0] * length, replace(_SAMPLED)) for number in range(count)]
    runner.set_observer(proposer)
    try:
        for request in requests:
            runner.admit(request, length + 1 + places)
        with runner.wrapper.no_timeout():
            prefilled = runner.execute([ScheduledRequest(request, length) for request in requests])
            for request, tokens in zip(requests, prefilled.tokens, strict=True):
                request.advance(length, tokens[0] if tokens else 0)  # no token if the logits are not finite
            if drafted:
                runner.execute(_drafted(requests[:drafted], drafts, proposer))
            runner.execute([ScheduledRequest(request, 1) for request in requests])
    finally:
        runner.set_observer(None)
        for request in requests:
            runner.release(request)
            if proposer is not None:
                proposer.forget(request)


def _drafted(requests: Sequence[Request], count: int, proposer: Proposer | None) -> list[ScheduledRequest]:
    """Shares of a verify step with `count` drafts each; zeros if the proposer makes fewer, or there is none."""
    drafts = [Draft(())] * len(requests) if proposer is None else proposer.propose(requests, [count] * len(requests))
    whole = [draft if len(draft.tokens) == count else Draft((0,) * count) for draft in drafts]
    pairs = zip(requests, whole, strict=True)
    return [ScheduledRequest(request, 1, draft.tokens, draft.parents, draft.probs) for request, draft in pairs]


def _graphs(runner: StepRunner, memory: DeviceMemory) -> int:
    """Estimate of the graphs' bytes; the graphs captured here are released when the runner's cache is closed."""
    free = [memory.free()]
    runner.capture_graphs(lambda _: free.append(memory.free()), _samples)
    took = iter([max(0, before - after) for before, after in pairwise(free)])
    return sum(
        graphs_in_all(steps.shapes, [(shape, next(took)) for shape in _samples(steps.shapes)])
        for steps in runner.captured_steps
    )


def _samples(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    """The two largest shapes of each kind."""
    kinds = [_kind(shape) for shape in shapes]
    return [shape for place, shape in enumerate(shapes) if kinds[:place].count(_kind(shape)) < 2]
