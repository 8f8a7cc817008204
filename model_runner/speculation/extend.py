"""Draft extend: the batch in which a draft model runs the tokens that a step of the target has accepted.

    target's step     root  d1  d2  d3     root  d1  d2  d3        rows, as verified
    accepted          root  d1             root                    a path from each root; in a tree, with gaps
    draft extend      root  d1  root                               ragged: 1 to D + 1 rows per request

Positions and slots are the target's, in which the accepted tokens follow each other. Back ends whose kernels need
equally many rows of every request pad the queries to the longest and unpad the output
(`attention.backends.few_queries`).

After a step without drafts the draft model runs all of its rows, at the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attention import CommonAttentionMetadata
from model_runner.step.step import Step
from ubatch import ConfigError, ForwardMode
from ubatch.streams import to_device


@dataclass(frozen=True)
class DraftExtendBatch:
    """The batch that a draft model runs after a step.

    Attributes:
        rows: `[T]` int64, indices of the target's rows (hidden states and input ids).
        positions: `[T]` int64, each token's position in its request.
        metadata: for attention; mode DRAFT_EXTEND, or after a step without drafts that step's mode.
        last_rows: `[R]` int64, index of each request's last row in this batch; only of requests that have rows.
    """

    rows: Tensor
    positions: Tensor
    metadata: CommonAttentionMetadata
    last_rows: Tensor


def draft_extend_batch(step: Step, accepted_rows: Sequence[Sequence[int]]) -> DraftExtendBatch:
    """Build the draft-extend batch of a step.

    Args:
        accepted_rows: as `StepObserver.observe` gets them; used for a verify step only.

    Raises:
        ConfigError: in a verify step, `accepted_rows` lacks a share's root and accepted drafts.
    """
    metadata, device = step.metadata, step.input_ids.device
    if step.mode is not ForwardMode.TARGET_VERIFY:
        rows, ends = torch.arange(step.num_tokens), torch.tensor(metadata.query_start_loc_cpu[1:], dtype=torch.int64)
        rows, last = to_device((rows, ends - 1), device)
        return DraftExtendBatch(rows, step.positions, metadata, last)

    firsts = list(metadata.query_start_loc_cpu[:-1])
    if [rows[0] if rows else None for rows in accepted_rows] != firsts:
        raise ConfigError(
            f"the roots of the verify step's requests are its rows {firsts}; accepted rows are "
            f"{[list(rows) for rows in accepted_rows]}. Give the root of each, and its accepted drafts."
        )
    lens = [len(rows) for rows in accepted_rows]
    prefixes = [seq - query for seq, query in zip(metadata.seq_lens_cpu, metadata.query_lens_cpu, strict=True)]
    host = (
        [row for rows in accepted_rows for row in rows],
        [first + place for first, length in zip(firsts, lens, strict=True) for place in range(length)],
        [prefix + place for prefix, length in zip(prefixes, lens, strict=True) for place in range(length)],
        [end - 1 for end in accumulate(lens)],
    )
    rows, places, positions, last = to_device([torch.tensor(each, dtype=torch.int64) for each in host], device)
    seq_lens = [prefix + length for prefix, length in zip(prefixes, lens, strict=True)]
    slots = metadata.slot_mapping.index_select(0, places)
    extend = CommonAttentionMetadata.build(lens, seq_lens, metadata.block_table, slots, ForwardMode.DRAFT_EXTEND)
    return DraftExtendBatch(rows, positions, extend, last)
