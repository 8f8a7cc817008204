"""Packages that are installed and cannot be imported: `auto` goes without them, asking by name says why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flashinfer_cases import BACKENDS

import moe.experts.registry
from attention import AttentionShape, make_attention_backend, make_kv_cache, usable_attention_backends
from attention.backends import registry
from attention.backends.flashinfer_kernels import FlashInferKernel, find_kernel
from model_runner.sampling.flashinfer_sampling import find_truncation, truncates
from moe import ExpertsShape, make_experts, usable_experts
from moe.all2all.deepep.base import import_deep_ep
from moe.experts.flashinfer import FlashInferExperts
from ubatch import ConfigError, LazyRegistry
from ubatch.kernels import candidates

CPU = torch.device("cpu")
MHA = AttentionShape(4, 2, 16)
SHAPE = ExpertsShape(held=4, num_experts=4, top_k=2, hidden_size=32, intermediate_size=16)
MISMATCH = "flashinfer-cubin version (0.6.1) does not match flashinfer version (0.7.2)"


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """flashinfer and DeepEP as they are where their parts do not fit together, and CPUs on which they would run."""
    for package in ("flashinfer", "deep_ep"):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise RuntimeError({MISMATCH!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(candidates, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "traits", replace(backend.traits, devices=("cpu",)))
    find_truncation.cache_clear()
    yield
    find_truncation.cache_clear()


def test_auto_goes_without_experts_that_cannot_be_imported() -> None:
    usable = usable_experts(SHAPE, torch.float32, CPU)
    assert MISMATCH in str(usable["flashinfer"])
    assert usable["triton"] is None


def test_experts_by_name_say_why() -> None:
    with pytest.raises(ConfigError, match=r"does not match .*flashinfer-cubin in the same version") as caught:
        make_experts("flashinfer", torch.zeros(1, 16, 8), torch.zeros(1, 8, 8))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_auto_goes_without_attention_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_candidates", lambda shape, device: ["flashinfer", "torch"])
    cache = make_kv_cache(MHA.cache_spec(1, 16, torch.float32), 3)
    usable = usable_attention_backends(MHA, cache)
    assert MISMATCH in str(usable["flashinfer"])
    assert usable["torch"] is None
    with pytest.raises(ConfigError, match="flashinfer-cubin in the same version"):
        make_attention_backend("flashinfer", MHA, cache)


@pytest.mark.parametrize("kernel", FlashInferKernel)
def test_every_kernel_of_attention_says_why(kernel: FlashInferKernel) -> None:
    with pytest.raises(ConfigError, match="does not match"):
        find_kernel(kernel)


def test_sampling_sorts_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "model_runner"):
        assert not truncates(torch.device("cuda"))
        assert not truncates(torch.device("cuda"))
    (record,) = caplog.records
    assert record.getMessage().startswith("top-k and top-p of whole vocabularies sort, without flashinfer: ")
    assert MISMATCH in record.getMessage()


def test_deepep_says_why() -> None:
    with pytest.raises(ConfigError, match=r"deep_ep cannot be imported .* 'deepep_v2' needs DeepEP: build it"):
        import_deep_ep("deepep_v2")


def test_a_registered_part_that_imports_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = LazyRegistry("experts back end", {"theirs": "flashinfer:Experts"})
    with pytest.raises(ConfigError, match=r"experts back end 'theirs' needs it: repair what it imports"):
        parts.load("theirs")


def test_auto_goes_without_experts_whose_module_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = LazyRegistry(
        "experts back end", {"theirs": "flashinfer:Experts", "grouped": "moe.experts.torch_experts:GroupedExperts"}
    )
    monkeypatch.setattr(moe.experts.registry, "_BACKENDS", theirs)
    monkeypatch.setattr(moe.experts.registry, "_CANDIDATES", ("theirs",))
    assert MISMATCH in str(usable_experts(SHAPE, torch.float32, CPU)["theirs"])
