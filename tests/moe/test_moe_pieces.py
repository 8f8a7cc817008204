"""A layer whose rank has more tokens than a dispatch has room for runs in pieces, as many on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deep_ep_standin_events import calls
from deepep_cases import Stack, check_layer, close, lanes_of, layer_of, rows_of, run_checks, tokens_of, transport

from ubatch import CommGroup, ConfigError, ForwardContext, get_schedule, set_forward_context

pytestmark = pytest.mark.ranks

ROOM = 4


def test_pieces() -> None:
    run_checks(_outside_lanes, _in_lanes, _nobody_voted)


def _backends(group: CommGroup, **options: Any) -> dict[str, Any]:
    names = ("deepep_low_latency", "deepep_v2")
    return {name: transport(name, group, max_tokens_per_rank=ROOM, **options) for name in names}


def _outside_lanes(rank: int, group: CommGroup) -> None:
    """As many dispatches on every rank as the one with most tokens needs; an idle rank goes along."""
    layer = layer_of()
    for use_fp8 in (False, True):
        for name, all2all in _backends(group, use_fp8=use_fp8).items():
            kernel = layer.kernel(all2all)
            for tokens, pieces in (((11, 3), 3), ((0, 9), 3), ((4, 4), 1), ((5, 0), 2)):
                what = f"{name}, {tokens}"
                routed = tokens_of(layer, tokens[rank], seed=10 + rank, unrouted=0.2)
                calls.clear()
                with set_forward_context(ForwardContext(tokens_across_ranks=tokens)):
                    check_layer(kernel, layer, routed, what, use_fp8)
                assert len([call for call, _, _ in calls if call.endswith("dispatch") and "hook" not in call]) == pieces


def _in_lanes(rank: int, group: CommGroup) -> None:
    """Lanes pass the points of one piece, however many they run; each piece in chunks, too."""
    layers = [layer_of(seed) for seed in (0, 1)]
    lanes = get_schedule("mlp_shared_overlap")
    for name, all2all in _backends(group).items():
        model, roomy = Stack(layers, all2all), Stack(layers, transport(name, group, max_tokens_per_rank=32))
        x = rows_of(21 - 8 * rank, rank)
        in_one_piece = roomy(x)
        for schedule in (lanes, replace(lanes, name="in two chunks", chunks=2)):
            wrapper = lanes_of(model, group, schedule)
            close(wrapper(x), in_one_piece, f"{name}, {schedule.name}")
            assert wrapper.statistics().engaged == 1, wrapper.statistics()
            wrapper.close()


def _nobody_voted(rank: int, group: CommGroup) -> None:
    """Then no rank can know how many pieces the others have: what does not fit is refused, before it is launched."""
    layer = layer_of()
    routed = tokens_of(layer, ROOM + 1)
    for name, all2all in _backends(group).items():
        with pytest.raises(ConfigError, match=f"'{name}' has room for 4 tokens of a rank at once, not 5"):
            layer.kernel(all2all)(routed.x, routed.weights, routed.ids)
