"""The `flashinfer` experts: their call by the installed signature, and on a GPU; their results: conformance tests."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_standin_wrappers import cutlass_fused_moe
from torch import Tensor

from moe import make_experts
from moe.experts import flashinfer
from moe.experts.flashinfer import FlashInferExperts, find_fused_moe
from ubatch import ConfigError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The stand-in on the CPU in the kernel's place; what it was called with."""
    calls: list[dict[str, Any]] = []

    def call(**kwargs: Any) -> Tensor:
        calls.append(kwargs)
        out: Tensor = cutlass_fused_moe(**kwargs)
        return out

    monkeypatch.setattr(flashinfer, "find_fused_moe", lambda: call)
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    return calls


def weights(held: int = 4, hidden: int = 16, intermediate: int = 8, **options: Any) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(held, 2 * intermediate, hidden, **options) * hidden**-0.5,
        torch.randn(held, hidden, intermediate, **options) * intermediate**-0.5,
    )


def routed(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Distinct experts per token, some of them nobody's, and their weights."""
    order = [torch.randperm(num_experts + 2)[:top_k] for _ in range(tokens)]
    ids = torch.stack(order) - 1 if order else torch.zeros(0, top_k, dtype=torch.int64)
    return ids, torch.rand(tokens, top_k)


def test_the_plain_weights_are_not_kept(stand_in: list[dict[str, Any]]) -> None:
    w13, w2 = weights()
    given = w13.clone()
    experts = make_experts("flashinfer", w13, w2)
    assert torch.equal(w13, given), "the caller's are left alone"
    assert {name for name, _ in experts.named_parameters()} == {"w31", "w2"}
    assert experts.capturable


def test_what_the_kernel_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_fused_moe", lambda: pytest.fail("looked for the kernel"))
    with pytest.raises(ConfigError, match="run on cuda, not on cpu"):
        make_experts("flashinfer", *weights())
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    with pytest.raises(ConfigError, match="hidden 12 and intermediate 8"):
        make_experts("flashinfer", *weights(hidden=12))


def test_a_missing_or_old_flashinfer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="Install flashinfer-python"):
        find_fused_moe()

    class Old:
        @staticmethod
        def cutlass_fused_moe(input: Tensor) -> None: ...

    monkeypatch.setattr(importlib, "import_module", lambda name: Old)
    with pytest.raises(ConfigError, match=r"0\.6 or later"):
        find_fused_moe()


def test_our_call_binds_to_the_installed_function(stand_in: list[dict[str, Any]]) -> None:
    """And its defaults are those that the stand-in was written for."""
    pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed; `make test` installs it", exc_type=ImportError
    )
    theirs = inspect.signature(find_fused_moe())
    make_experts("flashinfer", *weights())(torch.randn(2, 16), torch.tensor([[0], [1]]), torch.rand(2, 1))
    theirs.bind(**stand_in[0])
    ours: Callable[..., Any] = cutlass_fused_moe
    for name, parameter in inspect.signature(ours).parameters.items():
        assert theirs.parameters[name].default == parameter.default
    assert int(theirs.parameters["activation_type"].default) == 3, "SwiGLU"
    assert theirs.parameters["enable_alltoall"].default is False, "rows without an expert here are written"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first_expert", [0, 8])
def test_the_kernel_on_a_gpu(dtype: torch.dtype, first_expert: int) -> None:
    """Against float32 over the same rounded numbers, and the same numbers twice."""
    pytest.importorskip("flashinfer", reason="flashinfer is not installed", exc_type=ImportError)
    w13, w2 = (w.to(dtype) for w in weights(8, 256, 128))
    ids, topk_weights = routed(64, 24, 4)
    x = torch.randn(64, 256).to(dtype)
    there = make_experts("flashinfer", w13.cuda(), w2.cuda(), first_expert)
    out = there(x.cuda(), ids.cuda(), topk_weights.cuda())
    expected = make_experts("reference", w13.float(), w2.float(), first_expert)(x.float(), ids, topk_weights)
    close = math.ldexp(1.0, -6 if dtype == torch.bfloat16 else -9)
    torch.testing.assert_close(out.cpu().float(), expected, atol=close, rtol=close)
    assert torch.equal(out, there(x.cuda(), ids.cuda(), topk_weights.cuda()))
