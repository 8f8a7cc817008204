"""Which requests read what others of the same batch write."""

from __future__ import annotations

import random

import pytest
import torch

from attention import reads_of_later_writes


def reference(query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block: int) -> set[tuple[int, int]]:
    """Block by block, as the docstring says: the last writer of a block that another request reads."""
    pairs = set()
    for reader, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not query:
            continue
        for page in tables[reader][: -(-(seq - query) // block)]:
            writers = [
                writer
                for writer, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
                if q and page in tables[writer][(s - q) // block : -(-s // block)]
            ]
            if writers and max(writers) > reader:
                pairs.add((reader, max(writers)))
    return pairs


def test_a_prefix_hit_within_the_batch() -> None:
    # Request 1 computes blocks 5 and 6; requests 0 and 2 have them as their prefix.
    table = torch.tensor([[5, 6, 0], [5, 6, 0], [5, 6, 3]], dtype=torch.int32)
    assert reads_of_later_writes([4, 32, 4], [32, 32, 36], table, 16) == ((0, 1),)
    assert reads_of_later_writes([4, 0, 4], [32, 32, 36], table, 16) == ()  # computed before: nobody writes it
    assert reads_of_later_writes([], [], torch.zeros(0, 0, dtype=torch.int32), 16) == ()


@pytest.mark.parametrize("seed", range(30))
def test_against_the_plain_definition(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.choice([1, 4, 16])
    requests = rng.randint(1, 6)
    query_lens = [rng.choice([0, 1, 3, 20]) for _ in range(requests)]
    seq_lens = [query + rng.choice([0, 2, 16, 40]) for query in query_lens]
    tables = [[rng.randrange(12) for _ in range(-(-seq // block))] for seq in seq_lens]
    width = max(map(len, tables)) + 1
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in tables], dtype=torch.int32)
    found = reads_of_later_writes(query_lens, seq_lens, padded, block)
    assert set(found) == reference(query_lens, seq_lens, tables, block)
    assert list(found) == sorted(set(found))
