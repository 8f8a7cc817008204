"""Top-k and top-p by flashinfer: against sorting, by a stand-in; the call by the installed signature; on a GPU."""

import importlib
import inspect
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_runner.sampling import flashinfer_sampling
from model_runner.sampling.flashinfer_sampling import find_truncation, keep_most_likely, truncates
from ubatch import ConfigError
from ubatch.process.heartbeat import Heart
from ubatch.process.job_store import LATE_S


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    assert is_deterministic
    assert (probs.dtype, top_k.dtype) == (torch.float32, torch.int32)
    assert probs.is_contiguous()
    least = probs.sort(descending=True).values.gather(1, top_k[:, None].long() - 1)
    kept = probs.masked_fill(probs < least, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    assert is_deterministic
    assert (probs.dtype, top_p.dtype) == (torch.float32, torch.float32)
    ranked = probs.sort(descending=True).values
    before = ranked.cumsum(-1) - ranked
    number = (before < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    kept = probs.masked_fill(probs < ranked.gather(1, number - 1), 0)
    return kept / kept.sum(-1, keepdim=True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_truncation.cache_clear()
    yield
    find_truncation.cache_clear()


def sorted_out(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """One row, by sorting; probabilities differ."""
    kept, mass = torch.zeros_like(row), 0.0
    ranked = row.argsort(descending=True)[:top_k]
    total = row[ranked].sum()
    for token in ranked:
        if mass >= top_p:
            break
        kept[token] = row[token]
        mass += float(row[token] / total)
    return kept / kept.sum()


def check(device: str, rows: int, vocab: int, seed: int, ks: list[int], ps: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(rows, vocab, generator=generator, dtype=torch.float64).mul(6).softmax(-1)
    top_k, top_p = torch.tensor(ks), torch.tensor(ps, dtype=torch.float64)
    found = keep_most_likely(*(x.to(device) for x in (probabilities, top_k, top_p))).cpu()
    assert found.dtype == torch.float32
    expected = torch.stack([sorted_out(*each) for each in zip(probabilities, ks, ps, strict=True)])
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected.float())


@given(data=st.data(), rows=st.integers(1, 4), vocab=st.integers(1, 20), seed=st.integers(0, 99))
def test_equals_sorting(data: st.DataObject, rows: int, vocab: int, seed: int) -> None:
    ks = data.draw(st.lists(st.integers(1, vocab), min_size=rows, max_size=rows))
    ps = data.draw(st.lists(st.sampled_from([0.013, 0.31, 0.77, 1.0]), min_size=rows, max_size=rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_sampling, "find_truncation", lambda: (top_k_renorm_probs, top_p_renorm_probs))
        check("cpu", rows, vocab, seed, ks, ps)


def test_the_first_call_of_a_process_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer compiles in it; who watches this process is told before."""
    told: list[float] = []
    shapes: list[tuple[torch.Size, list[float]]] = []
    heart = Heart(told.append, every_s=60.0)

    def noting(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
        shapes.append((probs.shape, list(told)))
        return top_k_renorm_probs(probs, top_k, is_deterministic)

    flashinfer_sampling._compile.cache_clear()
    monkeypatch.setattr(flashinfer_sampling, "find_truncation", lambda: (noting, top_p_renorm_probs))
    for _ in range(2):
        keep_most_likely(torch.full((3, 4), 0.25), torch.full((3,), 2), torch.ones(3))
    heart.stop()
    assert shapes == [((1, 8), [LATE_S]), ((3, 4), [LATE_S]), ((3, 4), [LATE_S])]


def test_only_a_gpu_with_a_deterministic_flashinfer_truncates(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert not truncates(torch.device("cpu"))

    class Old:
        @staticmethod
        def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> None: ...

        top_p_renorm_probs = top_k_renorm_probs

    class New:
        top_k_renorm_probs = staticmethod(top_k_renorm_probs)
        top_p_renorm_probs = staticmethod(top_p_renorm_probs)

    def missing(name: str) -> None:
        raise ImportError

    for module, expected in ((lambda name: Old, False), (missing, False), (lambda name: New, True)):
        find_truncation.cache_clear()
        monkeypatch.setattr(importlib, "import_module", module)
        assert truncates(cuda) == expected
        if not expected:
            with pytest.raises(ConfigError, match="too old to be deterministic"):
                keep_most_likely(torch.ones(1, 1), torch.ones(1), torch.ones(1))


@pytest.mark.long
def test_the_installed_functions_take_our_call() -> None:
    pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed; `make test` installs it", exc_type=ImportError
    )
    found = find_truncation()
    assert found is not None
    for theirs, ours in zip(found, (top_k_renorm_probs, top_p_renorm_probs), strict=True):
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


@pytest.mark.gpu
def test_a_row_on_a_gpu_is_what_it_is_alone() -> None:
    """Whoever shares its batch, bit for bit."""
    pytest.importorskip("flashinfer", reason="flashinfer is not installed", exc_type=ImportError)
    ks, ps = [1, 50, 32000, 700], [0.9, 1.0, 0.5, 0.3]
    check("cuda", 4, 32000, 7, ks, ps)
    probabilities = torch.randn(64, 150_000, device="cuda").mul(3).softmax(-1)
    top_k = torch.full((64,), 150_000, device="cuda")
    top_k[::2] = 40
    top_p = torch.full((64,), 0.9, device="cuda")
    together = keep_most_likely(probabilities, top_k, top_p)
    for row in (0, 1, 63):
        own = slice(row, row + 1)
        assert torch.equal(keep_most_likely(probabilities[own], top_k[own], top_p[own]), together[own])
