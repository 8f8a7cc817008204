"""`ubatch bench attention`: the CPU's back ends against simpler code, and a model against transformers.

    decode      one layer step of 64 sequences with 512 tokens each, against loops over the sequences, on one core
    prefill     64 prompts of 128 tokens, against one dense scaled_dot_product_attention call of the same work
    split       `split_attn_metadata` of 256 requests into two lanes
    generate    a Qwen3-MoE of 100 M parameters: 64 prompts of 128 tokens, 64 new ones, against transformers, all cores

Attention is measured as the model runs it: one plan per step, shared by all layers; the figure includes its cost.
"""

import tempfile
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from attention import AttentionShape, CommonAttentionMetadata, UBatchAttention, make_kv_cache, split_attn_metadata
from model_runner import keep_freed_memory
from serving.ranks import pin_rank
from serving.workbench.arms.cells import scattered_metadata
from serving.workbench.bench.generate import GenerateResult, measure_generate
from serving.workbench.bench.options import BlockOptions
from serving.workbench.bench.statistics import Interval, bootstrap, fastest, interleave_arms, paired, print_arms, timed
from ubatch import split_fixed
from ubatch.kernels import why_not_c

_HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _PAGE = 8, 2, 64, 8, 16  # of the 100 M model


class Options(BlockOptions):
    """What to measure."""

    sequences: int = Field(64, ge=2, description="of the decode and prefill steps")
    context: int = Field(512, ge=2, description="tokens of a sequence in the decode step")
    prompt: int = Field(128, ge=2, description="tokens of a prompt in the prefill step")
    requests: int = Field(256, ge=2, description="of the metadata that is split")
    generate: bool = Field(True, description="also compare a whole model with transformers")
    generate_blocks: int = Field(3, ge=1, description="A B B A blocks of whole generations")


@dataclass(frozen=True)
class _Step:
    """One attention step of all layers, ready to run."""

    attention: UBatchAttention
    metadata: CommonAttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor

    def run(self) -> Tensor:
        """Plan, then run all layers."""
        plan: Any = self.attention.plan(self.metadata)
        out = self.q
        for layer in range(_LAYERS):
            out = plan.forward(self.q, self.k, self.v, layer)
        return out


def run(options: Options) -> int:
    results: dict[str, Any] = {}
    generated = None
    if options.generate:  # first, because this process is pinned to one core afterwards
        with tempfile.TemporaryDirectory() as folder:
            generated = measure_generate(Path(folder), options.generate_blocks)
    pin_rank(0, 1)
    keep_freed_memory()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results["decode"] = _decode(options)
        results["prefill"] = _prefill(options)
        results["split_us"] = _split(options)
    _print(options, results, generated)
    if generated is not None:
        results["generate"] = generated
    options.write(results)
    return 0


def _make_step(query_len: int, seq_len: int, sequences: int, backend: str = "torch") -> _Step:
    """A step of sequences of equal length, with pages scattered over the cache."""
    shape = AttentionShape(_HEADS, _KV_HEADS, _HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    spec = shape.cache_spec(_LAYERS, _PAGE, torch.float32)
    cache: Any = make_kv_cache(spec, sequences * spec.blocks_for(seq_len))
    for pool in (cache.key_pool, cache.value_pool):
        pool.memory.normal_(generator=generator)
    metadata = scattered_metadata(sequences, query_len, seq_len, _PAGE, torch.device("cpu"))
    tokens = query_len * sequences
    q = torch.randn(tokens, _HEADS, _HEAD_DIM, generator=generator)
    k, v = torch.randn(2, tokens, _KV_HEADS, _HEAD_DIM, generator=generator)
    return _Step(UBatchAttention(shape, cache, backend), metadata, q, k, v)


def _decode(options: Options) -> dict[str, Any]:
    step = _make_step(1, options.context, options.sequences)
    backends = {"torch": step}
    if why_not_c() is None:
        backends["native"] = _make_step(1, options.context, options.sequences, "native")
    arms: dict[str, Callable[[], Tensor]] = {
        **{name: own.run for name, own in backends.items()},
        "loop_sdpa": lambda: _loop(step, _attend_repeated),
        "loop_folded": lambda: _loop(step, _attend_folded),
        "loop_matmul": lambda: _loop(step, _attend_matmul),
    }
    for arm in arms.values():
        torch.testing.assert_close(arm(), step.run(), atol=1e-4, rtol=1e-4)
    measured = interleave_arms({name: timed(arm) for name, arm in arms.items()}, options.blocks, label="decode")
    best = fastest(measured, (name for name in arms if name.startswith("loop")))
    num_bytes = _LAYERS * options.sequences * options.context * 2 * _KV_HEADS * _HEAD_DIM * 4
    bandwidth = _read_bandwidth()
    limit_ms = num_bytes / bandwidth * 1e3
    return {
        "arms_ms": measured,
        "best_loop": best,
        "speedup": {name: paired(measured[best], measured[name]) for name in backends},
        "bandwidth_gb_s": bandwidth / 1e9,
        "bandwidth_share": {name: bootstrap([limit_ms / value for value in measured[name]]) for name in backends},
    }


def _loop(step: _Step, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Attention over one sequence at a time: gather its pages, then attend."""
    cache: Any = step.attention.kv_cache
    slots = cache.write_slots(step.metadata.slot_mapping)
    tables = [row.long() for row in step.metadata.block_table]
    length = step.metadata.max_seq_len
    out = torch.empty_like(step.q)
    for layer in range(_LAYERS):
        cache.write(layer, step.k, step.v, slots)
        keys, values = cache.keys(layer), cache.values(layer)
        for index, table in enumerate(tables):
            own_keys, own_values = (pool[table].flatten(0, 1)[:length] for pool in (keys, values))
            out[index] = attend(step.q[index], own_keys, own_values)
    return out


def _attend_repeated(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    heads = F.scaled_dot_product_attention(
        q[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
    )
    return heads[0, :, 0]


def _attend_folded(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    rows = q.view(1, _KV_HEADS, _HEADS // _KV_HEADS, _HEAD_DIM)
    out = F.scaled_dot_product_attention(rows, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return out.reshape(_HEADS, _HEAD_DIM)


def _attend_matmul(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    rows = q.view(_KV_HEADS, _HEADS // _KV_HEADS, _HEAD_DIM)
    weights = torch.softmax(rows @ keys.permute(1, 2, 0) * _HEAD_DIM**-0.5, dim=-1)
    return (weights @ values.transpose(0, 1)).view(_HEADS, _HEAD_DIM)


def _prefill(options: Options) -> dict[str, Any]:
    step = _make_step(options.prompt, options.prompt, options.sequences)
    q, k, v = (
        x.view(options.sequences, options.prompt, -1, _HEAD_DIM).transpose(1, 2) for x in (step.q, step.k, step.v)
    )

    def dense() -> Tensor:
        out = q
        for _ in range(_LAYERS):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out

    torch.testing.assert_close(step.run(), dense().transpose(1, 2).flatten(0, 1), atol=1e-4, rtol=1e-4)
    measured = interleave_arms({"torch": timed(step.run), "dense": timed(dense)}, options.blocks, label="prefill")
    return {"arms_ms": measured, "over_dense": paired(measured["torch"], measured["dense"])}


def _split(options: Options) -> Interval:
    """Microseconds of one split of a decode batch."""
    step = _make_step(1, _PAGE * 4, options.requests)
    slices = split_fixed(options.requests)
    timer = timeit.Timer(lambda: split_attn_metadata(slices, step.metadata))
    timer.timeit(100)  # a warm-up
    return bootstrap([timer.timeit(50) / 50 * 1e6 for _ in range(options.blocks)])


def _read_bandwidth() -> float:
    """Bytes per second that one core reads: the best of several passes over 256 MiB."""
    data = torch.ones(64 << 20)
    read = timed(data.sum)
    return data.nbytes / min(read() for _ in range(5)) * 1e3


def _print(options: Options, results: Mapping[str, Any], generated: GenerateResult | None) -> None:
    decode, prefill = results["decode"], results["prefill"]
    print(f"decode: {options.sequences} sequences x {options.context} tokens, {_LAYERS} layers, one core")
    print_arms(decode["arms_ms"], ".2f")
    for name, speedup in decode["speedup"].items():
        limit = f"of the memory-bandwidth limit ({decode['bandwidth_gb_s']:.1f} GB/s)"
        print(f"  {name}: {speedup:.3f}x {decode['best_loop']}; {decode['bandwidth_share'][name]:.3f} {limit}")
    print(f"prefill: {options.sequences} prompts x {options.prompt} tokens, {_LAYERS} layers, one core")
    print_arms(prefill["arms_ms"], ".2f")
    print(f"  torch / dense   {prefill['over_dense']:.3f}")
    print(f"split_attn_metadata of {options.requests} requests into two lanes   {results['split_us']:.1f} us")
    if generated is not None:
        generated.print()
