"""Overlap in your own module: three lines.

    python examples/wrap_module.py

A tensor-parallel feed-forward stack is split over two ranks; an all-reduce after every block adds up their halves. The
code is as it would be without this project, except that the all-reduce is `ubatch.all_reduce`. When the module is
wrapped, the batch runs as two microbatches, and one computes while the other's all-reduce is in flight.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving.ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, UBatchWrapper, all_reduce, summarise, tracing

HIDDEN, INTERMEDIATE, BLOCKS = 256, 1024, 4


class Block(nn.Module):
    """A column-parallel and a row-parallel matrix: every rank has its share of the intermediate features."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE // group.size, bias=False)
        self.down = nn.Linear(INTERMEDIATE // group.size, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden]` in and out."""
        partial = self.down(F.gelu(self.up(self.norm(x))))
        return x + all_reduce(partial, self.group)


@torch.inference_mode()
def rank_main(rank: int, world_size: int, tokens: int) -> bool:
    """One rank: run the module unwrapped, then wrapped; whether the outputs are equal and one call overlapped."""
    torch.manual_seed(rank)
    group = CommGroup.from_process_group()
    model = nn.Sequential(*(Block(group) for _ in range(BLOCKS)))

    config = UBatchConfig(group=group, dbo_prefill_token_threshold=256)
    overlapped = UBatchWrapper(model, config)

    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    plain = model(x)
    overlapped(x)  # the first call runs both unsplit and in lanes and compares; later calls overlap
    with tracing() as trace:
        result = overlapped(x)
    overlapped(x[:8])  # too few tokens: runs unsplit, counted in `declined`
    statistics = overlapped.statistics()
    overlapped.close()
    difference = float((result - plain).abs().max())
    if rank == 0:
        print(f"largest difference to the unwrapped module: {difference:.1e}")
        declined = {str(reason): count for reason, count in statistics.declined.items()}
        print(f"calls: {statistics.engaged} overlapped, not overlapped: {declined}")
        print(f"all-reduce time hidden: {summarise(trace.spans).hidden_fraction:.0%}")
    return difference < 1e-4 and statistics.engaged == 1


def main() -> int:
    """Run two ranks; exit status 1 if the outputs differ or nothing overlapped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="rows of the batch (default 2048, at least 256)")
    tokens: int = parser.parse_args().tokens
    if tokens < 256:
        parser.error(f"--tokens is {tokens}; the example's threshold is 256, fewer would not overlap.")
    return 0 if run_ranks(rank_main, 2, tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
