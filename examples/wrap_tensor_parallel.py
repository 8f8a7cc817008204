"""Overlap in a model that torch itself runs on several ranks: one line, and the model is not touched.

    python examples/wrap_tensor_parallel.py

A dense Llama of Hugging Face `transformers`, with random weights, runs in torch's own tensor parallelism
(`parallelize_module`) over two ranks: torch launches and waits for an all-reduce after every attention and every MLP.
With `intercept_collectives=True` a wait inside torch switches to the other microbatch: the batch runs as two
microbatches, and one computes while the other's all-reduce is in flight.
"""

import argparse
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from serving.ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, UBatchWrapper, summarise, tracing

SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


@torch.no_grad()  # in inference_mode() torch would gather weights instead of activations
def rank_main(rank: int, world_size: int, sequences: int) -> bool:
    """One rank: run the sharded model unwrapped, then wrapped; whether the logits are equal and one call overlapped."""
    torch.manual_seed(0)  # the same whole model on every rank; each keeps its shard
    model = LlamaForCausalLM(SHAPE).eval()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)

    config = UBatchConfig(group=CommGroup.from_process_group(), dbo_prefill_token_threshold=128)
    overlapped = UBatchWrapper(model, config, intercept_collectives=True)

    ids = torch.randint(0, SHAPE.vocab_size, (sequences, 64), generator=torch.Generator().manual_seed(1))
    plain = model(ids, use_cache=False).logits
    overlapped(ids, use_cache=False)  # the first call runs both unsplit and in lanes and compares
    with tracing() as trace:
        result = overlapped(ids, use_cache=False).logits
    with torch.enable_grad():  # training runs unsplit, counted in `declined`
        overlapped(ids, use_cache=False)
    statistics = overlapped.statistics()
    overlapped.close()
    difference = float((result - plain).abs().max())
    if rank == 0:
        print(f"largest difference to the unwrapped model: {difference:.1e}")
        declined = {str(reason): count for reason, count in statistics.declined.items()}
        print(f"calls: {statistics.engaged} overlapped, not overlapped: {declined}")
        print(f"all-reduce time hidden: {summarise(trace.spans).hidden_fraction:.0%}")
    return difference < 1e-4 and statistics.engaged == 1


def main() -> int:
    """Run two ranks; exit status 1 if the outputs differ or nothing overlapped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=16, help="each of 64 tokens (default 16, at least 2)")
    sequences: int = parser.parse_args().sequences
    if sequences < 2:
        parser.error(f"--sequences is {sequences}; two microbatches need at least 2.")
    return 0 if run_ranks(rank_main, 2, sequences) else 1


if __name__ == "__main__":
    sys.exit(main())
