"""Modules whose collectives are torch's own: waits become points, and the outputs stay the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from ubatch import (
    CommGroup,
    DeclineReason,
    GradientError,
    SpanKind,
    Trace,
    UBatchConfig,
    UBatchWrapper,
    UnvotedCollectiveError,
    tracing,
)
from ubatch.ranks.intercept import intercepting

HIDDEN, LAYERS = 16, 3


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).eval()


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = blocks()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def config(lanes: int = 2) -> UBatchConfig:
    return UBatchConfig(
        verify="off",
        num_ubatches=lanes,
        dbo_prefill_token_threshold=lanes,
        dbo_decode_token_threshold=lanes,
        group=CommGroup.from_process_group(),
        require_overlap=True,
    )


def traced(wrapper: UBatchWrapper, *args: Any, **kwargs: Any) -> tuple[Any, Trace]:
    with torch.no_grad(), tracing() as trace:
        return wrapper(*args, **kwargs), trace


# ------------------------------------------------------------------------------------------------------ what it does


def on_tensor_parallel_ranks(rank: int, world_size: int, lanes: int) -> tuple[Tensor, Tensor, list[Any], int]:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    wrapper = UBatchWrapper(model, config(lanes), intercept_collectives=True)
    with torch.no_grad():
        plain = model(x) + 0  # which waits
    overlapped, trace = traced(wrapper, x)
    with torch.inference_mode():  # here torch gathers weights, and waits inside of its own functions
        torch.testing.assert_close(wrapper(x), overlapped)
    wrapper.close()
    return plain, overlapped, trace.order, sum(span.kind is SpanKind.TRANSFER for span in trace.spans)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [2, 3])
def test_a_sharded_module_overlaps_its_all_reduces(lanes: int) -> None:
    expected = blocks()(torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)))
    order = [(lane, "collective") for _ in range(LAYERS) for lane in range(lanes)] + [(i, "end") for i in range(lanes)]
    for plain, overlapped, seen, transfers in run_ranks(on_tensor_parallel_ranks, 2, lanes):
        torch.testing.assert_close(plain, expected)
        torch.testing.assert_close(overlapped, plain)
        assert seen == order, "every all-reduce of a lane travels while the others compute"
        assert transfers == LAYERS * lanes


def on_all_functional_collectives(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    group = dist.group.WORLD

    class Every(nn.Module):
        """One of each, whose results are needed in another order than they were launched."""

        def forward(self, x: Tensor) -> Tensor:
            """`[rows, HIDDEN]` to the same."""
            summed = functional.all_reduce(x, "sum", group)
            gathered = functional.all_gather_tensor(x, 0, group)
            scattered = functional.reduce_scatter_tensor(gathered + 1, "sum", 0, group)
            swapped = functional.all_to_all_single(x.repeat(world_size, 1), None, None, group)
            some = functional.all_reduce_coalesced([x, x + 1], "sum", group)
            return swapped[: x.shape[0]] + scattered + summed + some[0] + some[1]

    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(rank))
    wrapper = UBatchWrapper(Every().eval(), config(), intercept_collectives=True)
    with torch.inference_mode():
        halves = torch.cat([Every()(half) for half in x.chunk(2)])
    overlapped, trace = traced(wrapper, x)
    wrapper.close()
    assert (0, "collective") in trace.order
    return [(halves, overlapped)]


def test_every_functional_collective() -> None:
    for ((halves, overlapped),) in run_ranks(on_all_functional_collectives, 2):
        torch.testing.assert_close(overlapped, halves)


class SummingInPlace(nn.Module):
    """Torch's own all-reduce, which waits at once: in place, and of a group that is not named."""

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        y = x * 2
        assert dist.all_reduce(y) is None
        late = y + 1
        work = dist.all_reduce(late, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        return y * late


def on_all_reduces_that_wait_at_once(rank: int, world_size: int) -> tuple[Tensor, Tensor, list[Any], int, str]:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(rank))
    wrapper = UBatchWrapper(SummingInPlace().eval(), config(), intercept_collectives=True)
    plain = wrapper.module(x)
    wrapper(x)
    overlapped, trace = traced(wrapper, x)
    wrapper.close()
    settings = UBatchConfig(verify="off", dbo_prefill_token_threshold=2)
    alone = UBatchWrapper(SummingInPlace(), settings, intercept_collectives=True)
    with pytest.raises(UnvotedCollectiveError) as unvoted:
        alone(x)
    alone.close()
    transfers = sum(span.kind is SpanKind.TRANSFER for span in trace.spans)
    return plain, overlapped, trace.order, transfers, str(unvoted.value)


def test_all_reduces_that_wait_at_once() -> None:
    for plain, overlapped, order, transfers, unvoted in run_ranks(on_all_reduces_that_wait_at_once, 2):
        torch.testing.assert_close(overlapped, plain)
        assert order == [(0, "collective"), (1, "collective"), (0, "end"), (1, "end")]
        assert transfers == 2, "what the module waits for by itself is its own business"
        assert "torch's all_reduce over ranks [0, 1]" in unvoted


def on_a_llama(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    whole = LlamaForCausalLM(shape).eval()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world_size,))
    attention = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    mlp = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for layer in model.model.layers:
        out = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, attention | mlp | out)
    ids = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(2))
    wrapper = UBatchWrapper(model, config(), intercept_collectives=True)
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        reference = whole(ids, use_cache=False).logits
    overlapped, trace = traced(wrapper, ids, use_cache=False)
    wrapper.close()
    return reference, plain, overlapped.logits, trace.order.count((1, "collective"))


@pytest.mark.slow
def test_a_dense_llama_of_transformers() -> None:
    for reference, plain, overlapped, points in run_ranks(on_a_llama, 2):
        torch.testing.assert_close(plain, reference)
        torch.testing.assert_close(overlapped, plain)
        assert points == 2 * 2, "one all-reduce behind attention and one behind the MLP, per layer"


# -------------------------------------------------------------------------------------------------- what it refuses


class Summing(nn.Module):
    """An all-reduce of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 2


def on_unvoted_ranks(rank: int, world_size: int) -> tuple[str, str]:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    alone = UBatchWrapper(model, UBatchConfig(verify="off", dbo_prefill_token_threshold=2), intercept_collectives=True)
    with torch.inference_mode(), pytest.raises(UnvotedCollectiveError) as unvoted:
        alone(torch.ones(8, HIDDEN))
    alone.close()
    summing = UBatchWrapper(Summing(), config())
    with intercepting(), pytest.raises(GradientError) as training:
        summing(torch.ones(8, HIDDEN, requires_grad=True))
    summing.close()
    return str(unvoted.value), str(training.value)


def test_what_could_dead_lock_is_refused() -> None:
    for unvoted, training in run_ranks(on_unvoted_ranks, 2):
        assert "Set UBatchConfig.group" in unvoted
        assert "requires grad" in training


class Affine(nn.Module):
    """Has a parameter, and an argument that is hidden in another one."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        return x * self.weight


@pytest.mark.parametrize(
    ("trained", "x_grad", "enabled", "declines"),
    [(True, False, True, True), (False, True, True, True), (False, False, True, False), (True, True, False, False)],
)
def test_calls_that_record_gradients_run_as_they_are(
    trained: bool, x_grad: bool, enabled: bool, declines: bool
) -> None:
    x = torch.ones(4, HIDDEN, requires_grad=x_grad)
    settings = UBatchConfig(verify="off", dbo_prefill_token_threshold=2)
    wrapper = UBatchWrapper(Affine(trained), settings, intercept_collectives=True)
    with torch.set_grad_enabled(enabled):
        result = wrapper(x)
    seen = wrapper.statistics()
    assert seen.declined == ({DeclineReason.GRADIENTS: 1} if declines else {})
    assert seen.engaged == (not declines)
    assert result.requires_grad == declines
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        again(x)
        assert again.statistics().declined == ({DeclineReason.GRADIENTS: 1} if trained or x_grad else {})
        again.close()
    wrapper.close()
    plain = UBatchWrapper(Affine(trained), settings)
    plain(x)
    assert plain.statistics().engaged == 1, "a module without torch's collectives may be trained in lanes"
    plain.close()


def test_outside_of_the_block_torch_is_as_it_was() -> None:
    before = {name: value for name, value in vars(functional).items() if callable(value)}
    reduces = dist.all_reduce
    with intercepting():
        with intercepting():
            assert functional.wait_tensor is not before["wait_tensor"]
        assert functional.all_reduce is not before["all_reduce"]
        assert dist.all_reduce is not reduces
    assert {name: value for name, value in vars(functional).items() if callable(value)} == before
    assert dist.all_reduce is reduces
