"""Modules whose collectives are torch's own: waits become points, and the outputs stay the same."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, DeclineReason, UBatchConfig, UBatchWrapper, UnvotedCollectiveError
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


def settings(lanes: int = 2, group: CommGroup | None = None) -> UBatchConfig:
    return UBatchConfig(verify="off", num_ubatches=lanes, dbo_prefill_token_threshold=lanes, group=group)


def intercepted(module: nn.Module, lanes: int = 2, group: CommGroup | None = None) -> UBatchWrapper:
    return UBatchWrapper(module, settings(lanes, group), intercept_collectives=True)


def traced(wrapper: UBatchWrapper, x: Tensor) -> tuple[Tensor, list[tuple[int, str]], int]:
    """The outputs, the order of points, and the number of transfers."""
    with torch.no_grad(), ubatch.tracing() as trace:
        result = wrapper(x)
    return result, trace.order, sum(span.kind is ubatch.SpanKind.TRANSFER for span in trace.spans)


def rows(seed: int, number: int = 6) -> Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------ what it does


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [2, 3])
@on_ranks(2)
def test_a_sharded_module_overlaps_its_all_reduces(rank: int, group: CommGroup, lanes: int) -> None:
    model, x = sharded(init_device_mesh("cpu", (group.size,))), rows(1, 8)
    wrapper = intercepted(model, lanes, group)
    with torch.no_grad():
        plain = model(x) + 0  # which waits
    overlapped, order, transfers = traced(wrapper, x)
    with torch.inference_mode():  # here torch gathers weights, and waits inside of its own functions
        torch.testing.assert_close(wrapper(x), overlapped)
    torch.testing.assert_close(plain, blocks()(x).detach())
    torch.testing.assert_close(overlapped, plain)
    each = [(lane, "collective") for lane in range(lanes)]
    assert order == each * LAYERS + [(lane, "end") for lane in range(lanes)], "all travel while the others compute"
    assert transfers == LAYERS * lanes


class Every(nn.Module):
    """One of each, whose results are needed in another order than they were launched."""

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        group = dist.group.WORLD
        summed = functional.all_reduce(x, "sum", group)
        gathered = functional.all_gather_tensor(x, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered + 1, "sum", 0, group)
        swapped = functional.all_to_all_single(x.repeat(dist.get_world_size(), 1), None, None, group)
        some = functional.all_reduce_coalesced([x, x + 1], "sum", group)
        return swapped[: x.shape[0]] + scattered + summed + some[0] + some[1]


@on_ranks(2)
def test_every_functional_collective(rank: int, group: CommGroup) -> None:
    x = rows(rank)
    wrapper = intercepted(Every().eval(), 2, group)
    with torch.inference_mode():
        halves = torch.cat([Every()(half) for half in x.chunk(2)])
    overlapped, order, _ = traced(wrapper, x)
    assert (0, "collective") in order
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


@on_ranks(2)
def test_all_reduces_that_wait_at_once(rank: int, group: CommGroup) -> None:
    x = rows(rank)
    wrapper = intercepted(SummingInPlace().eval(), 2, group)
    plain = wrapper.module(x)
    wrapper(x)
    overlapped, order, transfers = traced(wrapper, x)
    torch.testing.assert_close(overlapped, plain)
    assert order == [(0, "collective"), (1, "collective"), (0, "end"), (1, "end")]
    assert transfers == 2, "what the module waits for by itself is its own business"
    alone = intercepted(SummingInPlace())
    with pytest.raises(UnvotedCollectiveError, match=r"torch's all_reduce over ranks \[0, 1\]"):
        alone(x)


# -------------------------------------------------------------------------------------------------- what it refuses


class Summing(nn.Module):
    """An all-reduce of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, HIDDEN]` to the same."""
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 2


@on_ranks(2)
def test_what_could_dead_lock_is_refused(rank: int, group: CommGroup) -> None:
    alone = intercepted(sharded(init_device_mesh("cpu", (group.size,))))
    with torch.inference_mode(), pytest.raises(UnvotedCollectiveError, match=r"Set UBatchConfig\.group"):
        alone(torch.ones(8, HIDDEN))
    summing = UBatchWrapper(Summing(), settings(2, group))
    with intercepting(), pytest.raises(ubatch.GradientError, match="requires grad"):
        summing(torch.ones(8, HIDDEN, requires_grad=True))


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
    wrapper = intercepted(Affine(trained))
    with torch.set_grad_enabled(enabled):
        result = wrapper(x)
    seen = wrapper.statistics()
    assert (seen.declined, seen.engaged) == ({DeclineReason.GRADIENTS: 1} if declines else {}, not declines)
    assert result.requires_grad == declines
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        again(x)
        assert again.statistics().declined == ({DeclineReason.GRADIENTS: 1} if trained or x_grad else {})
        again.close()
    wrapper.close()
    plain = UBatchWrapper(Affine(trained), settings())
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
