"""Transports without a second rank: names, payload rows, traits."""

from __future__ import annotations

import re
from dataclasses import fields
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from moe_layers import make_layer, make_tokens
from repository import ROOT

from attention.interface import BackendTraits
from moe import All2AllTraits, EmulatedLink, all2all_backends, make_all2all
from moe.all2all.payload import pack_rows, unpack_rows
from ubatch import CommGroup, ConfigError

TWO_RANKS = cast(CommGroup, SimpleNamespace(rank=0, size=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(3, 8, 2), (4, 7, 3), (1, 1, 1), (0, 5, 2)])
def test_a_row_carries_everything(dtype: torch.dtype, tokens: int, hidden: int, top_k: int) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.randint(-1, 1000, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    rows = pack_rows(x, ids, weights)
    assert rows.dtype is dtype
    assert rows.shape[1] * rows.element_size() == hidden * dtype.itemsize + top_k * 8
    got_x, got_ids, got_weights = unpack_rows(rows[torch.arange(tokens)], hidden)
    assert torch.equal(got_x, x)
    assert got_ids.tolist() == ids.tolist()
    assert got_ids.dtype is torch.int32
    assert torch.equal(got_weights, weights)


def test_payload_survives_bits_that_are_no_numbers() -> None:
    """Ids seen as floats are denormals and NaNs; they must travel bit by bit."""
    ids = torch.tensor([[-1, 0x7F800001, 1]])
    _, got, _ = unpack_rows(pack_rows(torch.zeros(1, 2), ids, torch.zeros(1, 3))[[0, 0]], 2)
    assert got.tolist() == ids.tolist() * 2


def test_local_hands_through() -> None:
    layer = make_layer()
    routed = make_tokens(layer, 5)
    local = make_all2all("local", group=None, num_experts=8)
    assert local.experts == range(8)
    dispatched = local.dispatch(routed.x, routed.ids, routed.weights).wait()
    assert dispatched.hidden_states is routed.x
    assert dispatched.experts == range(8)
    assert local.combine(routed.x, dispatched.handle).wait() is routed.x


def test_bad_names_and_options_are_refused() -> None:
    assert {"local", "torch_dist", "allgather_reducescatter", "emulated_link"} <= set(all2all_backends())
    with pytest.raises(ConfigError, match="unknown all2all back end 'torchdist'; did you mean 'torch_dist'"):
        make_all2all("torchdist", group=None, num_experts=8)
    with pytest.raises(ConfigError, match=r"'local': got an unexpected keyword argument 'link'.* group, num_experts"):
        make_all2all("local", group=None, num_experts=8, link=EmulatedLink(0.0, 1.0))
    with pytest.raises(ConfigError, match="'emulated_link': missing a required argument: 'link'"):
        make_all2all("emulated_link", group=None, num_experts=8)
    with pytest.raises(ConfigError, match="link must be an EmulatedLink, not float"):
        make_all2all("emulated_link", group=None, num_experts=8, link=1.0)
    with pytest.raises(ConfigError, match="cannot wrap itself"):
        make_all2all("emulated_link", group=None, num_experts=8, link=EmulatedLink(0.0, 1.0), inner="emulated_link")
    with pytest.raises(ConfigError, match="'local': got an unexpected keyword argument 'speed'"):
        make_all2all(
            "emulated_link", group=None, num_experts=8, link=EmulatedLink(0.0, 1.0), inner="local", speed="high"
        )
    for name in ("torch_dist", "allgather_reducescatter"):
        with pytest.raises(ConfigError, match="needs a CommGroup, not NoneType"):
            make_all2all(name, group=None, num_experts=8)
    with pytest.raises(ConfigError, match="'local' holds all experts on one rank, but the group has 2"):
        make_all2all("local", group=TWO_RANKS, num_experts=8)


def test_what_a_chunk_costs() -> None:
    def traits(other_ranks: int, routed: bool) -> All2AllTraits:
        return All2AllTraits(True, False, False, None, 1, other_ranks, routed)

    one_way_and_back = 2 * 16 * 2 + 4 * 8  # a bf16 row each way, four ids with their weights
    assert traits(7, routed=True).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 4 * one_way_and_back
    assert traits(2, routed=True).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 2 * one_way_and_back
    assert traits(7, routed=False).chunk_bytes(10, 16, 4, torch.bfloat16) == 10 * 7 * one_way_and_back
    assert make_all2all("local", group=None, num_experts=8).traits.chunk_bytes(10, 16, 4, torch.float32) == 0


@pytest.mark.long
def test_every_trait_is_read() -> None:
    """What a back end states and nobody asks is a promise that nothing keeps."""
    root = ROOT
    packages = ("ubatch", "moe", "attention", "model_runner", "serving")
    source = "\n".join(file.read_text() for package in packages for file in sorted((root / package).rglob("*.py")))
    for traits in (All2AllTraits, BackendTraits):
        for name in (field.name for field in fields(traits)):
            assert re.search(rf"(traits|self)\.{name}\b|\(\"{name}\", shape", source), f"{traits.__name__}.{name}"
