"""Prompts in chunks, in every way that tuning may choose, against the reference, a token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_batches import DEVICE  # before Triton is imported
from triton_linear import heads_of

from attention import GatedDeltaShape
from attention.linear.delta_rule import reference_delta_rule
from attention.linear.kernels import scan
from attention.linear.kernels.prepare import precision
from attention.linear.kernels.scan import ScanChoice, scan_chunks
from attention.linear.triton_plan import _largest_chunk

QWEN3_NEXT = GatedDeltaShape(16, 32, 128, 128, 4)
FEW_HEADS = GatedDeltaShape(1, 2, 128, 128, 4)
MOST = 4


@dataclass(frozen=True)
class Prompts:
    """Requests with these numbers of tokens: the slots of all but the first have states already.

    Attributes:
        mixed: `[T, conv_dim]`, what the convolution gives.
        g, beta: `[T, v_heads]`.
        states: `[slots, v_heads, k_dim, v_dim]`; the request at number r has slot r + 1.
    """

    shape: GatedDeltaShape
    lengths: tuple[int, ...]
    mixed: Tensor
    g: Tensor
    beta: Tensor
    states: Tensor

    @classmethod
    def random(cls, shape: GatedDeltaShape, lengths: tuple[int, ...], dtype: torch.dtype) -> Prompts:
        tokens, heads = sum(lengths), shape.num_v_heads
        torch.manual_seed(0)
        states = torch.randn(1 + len(lengths), heads, shape.k_dim, shape.v_dim) / 4
        mixed = torch.randn(tokens, shape.conv_dim).to(dtype)
        gates = -2 * torch.rand(tokens, heads).square(), torch.rand(tokens, heads)
        return cls(shape, lengths, *(each.to(DEVICE) for each in (mixed, *gates, states)))

    def run(self, choice: ScanChoice, chunk: int) -> tuple[Tensor, Tensor]:
        """Outputs, 7 where a request has too few tokens, and the states afterwards."""
        records, chunks, first = [], [], 0
        for request, length in enumerate(self.lengths):
            records.append([request + 1, int(request == 0), first, length, 0, len(chunks)])
            chunks += [[request, start] for start in range(0, length, chunk)]
            first += length
        states = self.states.clone()
        states[1] = float("nan")  # what another request left behind
        out = torch.full((first, self.shape.num_v_heads, self.shape.v_dim), 7.0, device=DEVICE)
        lists = (torch.tensor(each, device=DEVICE) for each in (records, chunks))
        inputs = self.mixed, self.g, self.beta, states, out, *lists
        scan_chunks(*inputs, choice, self.shape, chunk=chunk, most=MOST, write=True)
        return out, states

    def expected(self) -> tuple[Tensor, Tensor]:
        inputs = *heads_of(self.mixed, self.shape), self.g, self.beta
        states, rows = self.states.clone(), []
        states[1] = 0.0
        each_request = zip(*(each.split(self.lengths) for each in inputs), strict=True)
        for slot, (length, each) in enumerate(zip(self.lengths, each_request, strict=True), 1):
            if length > MOST:
                q, k, v, g, beta = each
                out, states[slot] = reference_delta_rule(q, k, v, g, beta, states[slot])
            else:
                out = torch.full_like(each[2], 7.0)
            rows.append(out)
        return torch.cat(rows), states


def compare(prompts: Prompts, choice: ScanChoice, chunk: int, near: float) -> None:
    for found, expected in zip(prompts.run(choice, chunk), prompts.expected(), strict=True):
        torch.testing.assert_close(found, expected, atol=near, rtol=near)


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("columns", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(DEVICE == "cuda", reason="tensor cores round more; see the test of every choice")
def test_wide_heads_in_parts(dtype: torch.dtype, columns: int, chunk: int) -> None:
    """Keys in several blocks, states in several programs, and requests that are left to `recur`."""
    prompts = Prompts.random(FEW_HEADS, (70, MOST, 33), dtype)
    compare(prompts, ScanChoice(columns, 4, 1), chunk, 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(DEVICE == "cuda", reason="tensor cores round more; see the test of a GPU")
def test_keys_that_are_alike_and_decays_of_all_sizes(dtype: torch.dtype) -> None:
    compare(harsh(dtype), scan.scan_choices(FEW_HEADS, dtype)[0], 64, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_alike_and_decays_of_all_sizes_compiled(dtype: torch.dtype) -> None:
    chunk, near = (16, 1e-3) if dtype == torch.float32 else (64, 2e-2)
    compare(harsh(dtype), scan.scan_choices(FEW_HEADS, dtype)[0], chunk, near)


def harsh(dtype: torch.dtype) -> Prompts:
    """The worst for the inverse, and sums of logarithms in the thousands between tokens that hardly decay."""
    prompts = Prompts.random(FEW_HEADS, (130, 64), dtype)
    size = FEW_HEADS.key_size
    prompts.mixed[:, size : 2 * size] = 1 + 0.1 * prompts.mixed[:, size : 2 * size]
    prompts.beta.fill_(1.0)
    prompts.g.mul_(1e-3)
    prompts.g[::9] = -100.0
    prompts.g[40:44] = torch.tensor([-3e4, float("-inf"), -1e-30, 0.0], device=DEVICE)[:, None]
    return prompts


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", [1.0, 0.01], ids=["decays", "hardly decays"])
def test_every_choice_gives_the_same_at_the_size_of_qwen3_next(kept: float) -> None:
    prompts = Prompts.random(QWEN3_NEXT, (300, MOST, 70), torch.bfloat16)
    prompts.g.mul_(kept)
    expected = prompts.expected()
    wrong = {}
    for choice in scan.scan_choices(QWEN3_NEXT, torch.bfloat16):
        for chunk in (32, 64):
            off = [
                float(((found - right).norm(dim=-1) / right.norm(dim=-1)).max())
                for found, right in zip(prompts.run(choice, chunk), expected, strict=True)
            ]
            if not max(off) < 2e-2:  # NaN is wrong, too
                wrong[choice, chunk] = off
    assert not wrong


def test_choices_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "INTERPRETED", False)
    choices = scan.scan_choices.__wrapped__(QWEN3_NEXT, torch.bfloat16)
    assert len(set(choices)) == len(choices) >= 4
    assert {choice.columns for choice in choices} == {32, 64}
    assert {choice.num_stages for choice in choices} == {2}, "one stage is wrong on an H200"
    narrow = scan.scan_choices.__wrapped__(GatedDeltaShape(1, 1, 4, 12, 1), torch.bfloat16)
    assert {choice.columns for choice in narrow} == {16}
    assert len(set(narrow)) == len(narrow) < len(choices)
    assert len(scan.scan_choices.__wrapped__(QWEN3_NEXT, torch.float32)) == 1


@pytest.mark.wide
def test_what_is_timed_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one for all choices, on one prompt and on several; short prompts are not timed."""
    keys = []

    def choose(key: str, choices: Any, run: Any, **options: Any) -> ScanChoice:
        keys.append(key)
        for each in (options["answer"], *options["also"]):
            found = [each(ScanChoice(columns, 4, 1)) for columns in (16, 32)]
            assert found[0].abs().amin() > 0
            torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        return choices[0]

    monkeypatch.setattr(scan, "_TOKENS", 8 * 64)
    monkeypatch.setattr(scan, "autotune", choose)
    shape = GatedDeltaShape(1, 2, 8, 32, 4)
    for chunk in (16, 32, 64):
        assert scan.tune_scan(shape, torch.float32, chunk, torch.device(DEVICE)).columns == 32
    assert len(keys) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_has_more_bits_than_bfloat16_runs_as_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "INTERPRETED", False)
    assert scan.scan_choices.__wrapped__(QWEN3_NEXT, dtype) == (ScanChoice(32, 4, 1),)
    assert precision(dtype) == "tf32x3"
    assert _largest_chunk.__wrapped__(torch.device("cuda", 0), dtype) == 16
