"""transformers' own parallelism under the wrapper: its three modes, without a line of glue."""

from __future__ import annotations

import pytest
import torch
from repository import TINY_MOE
from sharded_cases import check_calls, check_generate, hidden_transfers, load, prompts, wrapped

from ranks import run_ranks
from ubatch import CommGroup, SpanKind

pytestmark = pytest.mark.ranks

MODES = {
    "all_to_all": ("tensor-parallel", "all_to_all", {"all_reduce", "all_to_all_single"}),
    "all_reduce": ("tensor-parallel", "all_reduce", {"all_reduce"}),
    "fsdp": ("data-parallel", "auto", {"all_to_all_single"}),
}
"""By name: layout, `ep_implementation`, and collectives that travel while another lane computes."""


@torch.no_grad()
def on_ranks(rank: int, world_size: int, mode: str) -> None:
    layout, implementation, collectives = MODES[mode]
    whole, model = load(TINY_MOE), load(TINY_MOE, layout, implementation)
    with wrapped(model, group=CommGroup.from_process_group(), intercept_collectives=True) as wrapper:
        for uneven in (False, True):
            ids = prompts(rank, layout, uneven=uneven)
            trace = check_calls(whole, wrapper, ids)
            lanes = [lane for lane, point in trace.order if point == "collective"]
            assert lanes == [0, 1] * (len(lanes) // 2), "every collective of a lane travels while the other computes"
            assert len(lanes) >= 2 * model.config.num_hidden_layers
            assert {span.name for span in trace.spans if span.kind is SpanKind.TRANSFER} >= collectives
            for name in collectives:
                assert hidden_transfers(trace, name) > 0, name
            check_generate(whole, wrapper, ids)
        assert not wrapper.statistics().declined


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_transformers_shards(mode: str) -> None:
    run_ranks(on_ranks, 2, mode)
