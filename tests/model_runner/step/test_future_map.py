"""Tokens that are not known yet: the kernels against their references, and the map itself."""

from __future__ import annotations

import pytest
import torch

from model_runner import FutureMap, Request, SamplingParams, StepOrderError
from model_runner.step.future_map import resolve_reference, store_reference

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from model_runner.kernels.tokens import resolve_tokens, store_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 256, 300])
def test_the_kernels_do_what_their_references_do(num_tokens: int) -> None:
    rows = 600
    generator = torch.Generator().manual_seed(num_tokens)
    places = (torch.randperm(rows, generator=generator)[:num_tokens] + 1).to(DEVICE)
    tokens = torch.randint(0, 1 << 40, (num_tokens,), generator=generator).to(DEVICE)
    future, expected = (torch.arange(rows + 1, device=DEVICE) * 1000 for _ in range(2))
    store_tokens(future, places, tokens)
    store_reference(expected, places, tokens)
    assert torch.equal(future, expected)

    pending = torch.rand(num_tokens, generator=generator).to(DEVICE) < 0.5
    ids = torch.where(pending, -places, tokens % 50_000)
    before = ids.clone()
    resolved = resolve_tokens(ids, future)
    assert torch.equal(resolved, resolve_reference(ids, future))
    assert torch.equal(resolved[pending], tokens[pending])
    assert torch.equal(ids, before)


def test_sampled_tokens_of_another_width_are_stored() -> None:
    future = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    store_tokens(future, torch.tensor([3, 1], device=DEVICE), torch.tensor([7, 9], dtype=torch.int32, device=DEVICE))
    assert future.tolist() == [0, 9, 0, 7]


@pytest.mark.parametrize("kernels", [False, True])
def test_a_row_that_changes_hands(kernels: bool) -> None:
    """With the kernels, as on a GPU, and with the references."""
    futures = FutureMap(3, DEVICE)
    if kernels:
        futures._resolve, futures._store = resolve_tokens, store_tokens
    else:
        futures._resolve, futures._store = resolve_reference, store_reference
    first, second = (Request(name, [5], SamplingParams()) for name in ("first", "second"))
    places = torch.tensor([3, 1], device=DEVICE)
    futures.store(places, torch.tensor([70, 50], device=DEVICE), [(first, 1, 2), (second, 1, 0)])
    ids = torch.tensor([4, -1, 8, -3], device=DEVICE)
    assert futures.resolve(ids, [(second, 1, 0), (first, 1, 2)]).tolist() == [4, 50, 8, 70]
    assert futures.resolve(ids, ()) is ids
    with pytest.raises(StepOrderError, match="'second': its token 1 is pending"):
        futures.resolve(ids, [(second, 1, 2)])
    with pytest.raises(StepOrderError, match="'first': its token 2 is pending"):
        futures.resolve(ids, [(first, 2, 2)])


def test_who_runs_where() -> None:
    futures = FutureMap(3, DEVICE)
    on_gpu = DEVICE.type == "cuda"
    assert futures._resolve is (resolve_tokens if on_gpu else resolve_reference)
    assert futures._store is (store_tokens if on_gpu else store_reference)
