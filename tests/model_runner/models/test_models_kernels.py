"""Whole models on this project's kernels against transformers, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import model_checks
import pytest
from checkpoints import family_checkpoints_fixture
from model_checks import check_decode, check_overlap
from moe_layers import settings_of
from torch import Tensor
from triton_batches import DEVICE

from attention.kernels import cache, decode, latent
from model_runner.decoder import ops
from model_runner.kernels import layer_ops
from moe import router
from moe.kernels import router as router_kernel

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="forces kernels on models that live on the CPU"),
    pytest.mark.triton,
]
FAMILIES = ["Llama", "Qwen3Moe", "Glm4Moe", "GptOss", "MiMoV2Flash", "DeepseekV3"]


checkpoint = family_checkpoints_fixture()


def _route_in_triton(chooser: Any, logits: Tensor, num_tokens: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As for logits on a GPU; those on a CPU have a kernel in C."""
    return router_kernel.route_topk(logits, **settings_of(chooser), num_tokens=num_tokens)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Kernels wherever there are some, how often each ran, and few steps."""
    counts: dict[str, int] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    places = {
        layer_ops: ("rms_norm", "add_rms_norm", "rotate_heads", "silu_mul"),
        router_kernel: ("route_topk",),
        cache: ("write_kv",),
        decode: ("decode_attention",),
        latent: ("write_latent", "latent_decode"),
    }
    for module, names in places.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    monkeypatch.setattr("attention.backends.triton.mha.write_kv", cache.write_kv)
    monkeypatch.setattr("attention.backends.triton.mha.decode_attention", decode.decode_attention)
    monkeypatch.setattr("attention.backends.triton.mla.write_latent", latent.write_latent)
    monkeypatch.setattr("attention.backends.triton.mla.latent_decode", latent.latent_decode)
    monkeypatch.setattr(ops, "_KERNELS_ON", "cpu")
    monkeypatch.setattr(ops, "_fuses", lambda x: True)
    monkeypatch.setattr(router, "_fuses", lambda logits: True)
    monkeypatch.setattr(router, "_fused", _route_in_triton)
    monkeypatch.setattr(model_checks, "DECODE_STEPS", 2)
    return counts


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_kernels_equals_transformers(
    checkpoint: Callable[[str], Path], family: str, launched: dict[str, int]
) -> None:
    """A prefill and two decode steps; every kernel that the family has a use for was launched."""
    check_decode(checkpoint(family), prompts=[[5, 17, 99], [130]], attention_backend="triton")
    expected = {"rms_norm", "add_rms_norm"}
    expected |= set() if family == "GptOss" else {"silu_mul"}
    expected |= (
        {"write_latent", "latent_decode"}
        if family == "DeepseekV3"
        else {"rotate_heads", "write_kv", "decode_attention"}
    )
    expected |= set() if family == "Llama" else {"route_topk"}
    assert set(launched) == expected


@pytest.mark.slow
def test_so_it_does_in_two_lanes(
    checkpoint: Callable[[str], Path], launched: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_kernels = partial(check_decode, prompts=[[5, 17, 99], [130, 4]], attention_backend="triton")
    monkeypatch.setattr(model_checks, "check_decode", on_kernels)
    check_overlap(checkpoint("Qwen3Moe"), "mlp_shared_overlap")
    assert launched["decode_attention"]
    assert launched["route_topk"]
