"""Pieces of a step on several cores: side by side, in inference only, with the results of one core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attention_batches import make_batch

from attention.backends.torch_sdpa import TorchAttentionBackend
from model_runner import ModelRunner, SamplingParams, generate
from moe import make_experts
from moe.segments import segment_offsets, segment_sum
from ubatch import ConfigError, UBatchConfig, num_cores, row_pieces, run_pieces, several_cores


def threads_of(pieces: int) -> list[str]:
    """The name of the thread that ran each piece; the first two wait for each other, so they must overlap."""
    names = [""] * pieces
    overlapping = num_cores() > 1 and pieces > 1
    together = threading.Barrier(2, timeout=30)

    def piece(index: int) -> None:
        names[index] = threading.current_thread().name
        if index < 2 and overlapping:
            together.wait()

    run_pieces([lambda index=index: piece(index) for index in range(pieces)])  # type: ignore[misc]
    return names


@torch.inference_mode()
def test_pieces_run_side_by_side_on_as_many_threads() -> None:
    before, main = torch.get_num_threads(), threading.current_thread().name
    with several_cores(2):
        assert (num_cores(), torch.get_num_threads()) == (2, 1)
        first, second, third, fourth = threads_of(4)
        assert (first, third) == (main, main)
        assert second == fourth == "ubatch-core"
        assert threads_of(1) == [main]
    assert (num_cores(), torch.get_num_threads()) == (1, before)
    assert set(threads_of(3)) == {main}
    run_pieces([])


def test_outside_of_inference_mode_they_run_one_after_the_other() -> None:
    with several_cores(2):
        assert set(threads_of(3)) == {threading.current_thread().name}


def test_one_core_changes_nothing_and_none_is_refused() -> None:
    before = torch.get_num_threads()
    with several_cores(1):
        assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="at least 1, not 0"), several_cores(0):
        pass


@torch.inference_mode()
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_comes_when_all_have_ended_and_the_threads_go_on(failing: int) -> None:
    ended: list[int] = []

    def piece(index: int) -> None:
        if index == failing:
            raise ValueError(f"piece {index}")
        ended.append(index)

    with several_cores(2):
        with pytest.raises(ValueError, match=f"piece {failing}"):
            run_pieces([lambda: piece(0), lambda: piece(1)])
        assert ended == [1 - failing]
        assert threads_of(2)[1] == "ubatch-core"


@torch.inference_mode()
def test_pieces_of_pieces_run_on_the_thread_that_has_them() -> None:
    inner: list[str] = []

    def piece() -> None:
        with several_cores(2):
            run_pieces([lambda: inner.append(threading.current_thread().name)] * 2)

    with several_cores(2):
        run_pieces([piece, lambda: None])
    assert set(inner) == {threading.current_thread().name}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import os, torch
from ubatch import run_pieces, several_cores
def use():
    seen = []
    with torch.inference_mode(), several_cores(2):
        run_pieces([lambda: seen.append(1)] * 2)
    return len(seen)
assert use() == 2
child = os.fork()
if child == 0:
    os._exit(use())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@torch.inference_mode()
@pytest.mark.parametrize("requests", [[(40, 1)] * 7, [(90, 1), (3, 1), (17, 5), (8, 8), (8, 8), (30, 2)], [(5, 5)]])
@pytest.mark.parametrize("cores", [2, 3])
def test_attention_is_the_same_on_several_cores(requests: Sequence[tuple[int, int]], cores: int) -> None:
    batch = make_batch(list(requests))
    backend = TorchAttentionBackend(batch.shape, batch.new_cache())
    with several_cores(cores):
        plan = backend.plan(batch.metadata)
        assert plan.num_calls >= min(cores, len(requests))
        out = plan.forward(batch.q, batch.k, batch.v, 0)
    torch.testing.assert_close(out, batch.expected(), atol=2e-6, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["grouped", "packed"])
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_experts_are_the_same_on_several_cores(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    experts = make_experts(name, torch.randn(6, 32, 24), torch.randn(6, 24, 16), first_expert=2)
    x, weights = torch.randn(tokens, 24), torch.rand(tokens, 3)
    ids = torch.randint(0, 8, (tokens, 3))  # some are held elsewhere
    alone = experts(x, ids, weights)
    for cores in (2, 3):
        with several_cores(cores):
            torch.testing.assert_close(experts(x, ids, weights), alone, atol=0, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 300])
def test_rows_are_computed_in_pieces_if_there_are_enough(rows: int) -> None:
    x = torch.randn(rows, 3)
    pieces: list[slice] = []

    def compute(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        pieces.append(part)
        return x[part] * 2, x[part].sum(1)

    with several_cores(2):
        doubled, sums = row_pieces(compute, rows)
    torch.testing.assert_close((doubled, sums), (x * 2, x.sum(1)), atol=0, rtol=0)
    assert len(pieces) == (2 if rows >= 128 else 1)


@torch.inference_mode()
def test_segments_are_summed_in_pieces() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(0, 4, (200,))
    offsets, rows = segment_offsets(lengths), torch.randn(50, 8)
    index, weights = torch.randint(0, 50, (int(offsets[-1]),)), torch.rand(int(offsets[-1]))
    for weighted in (weights, None):
        alone = segment_sum(rows, index, offsets, weighted)
        with several_cores(2):
            torch.testing.assert_close(segment_sum(rows, index, offsets, weighted), alone, atol=0, rtol=0)


def test_a_runner_gives_the_same_tokens_on_several_cores() -> None:
    """As many cores as torch may use threads; the pieces did run on a thread of their own."""
    model = Path(__file__).parents[1] / "examples" / "models" / "tiny-moe"
    prompts = [[token + 1 for token in range(length)] for length in (90, 3, 41, 60, 12)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for cores in (1, 2):
            torch.set_num_threads(cores)
            with ModelRunner(model, dbo=UBatchConfig(enable_dbo=False), kv_cache_memory=8 << 20) as runner:
                outputs.append([each.token_ids for each in generate(runner, prompts, params)])
            assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(threads)
    assert outputs[0] == outputs[1]
    assert any(thread.name == "ubatch-core" for thread in threading.enumerate())
