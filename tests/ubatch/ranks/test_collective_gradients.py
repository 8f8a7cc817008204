"""Gradients through collectives on two ranks: torch's own, and the slope of the sum over all ranks, in fp64."""

import contextvars
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import Call, Mlp, collectives
from torch import Tensor
from torch.autograd import forward_ad

import ubatch
from ranks import on_ranks, run_ranks
from ubatch import CommGroup, GradientError
from ubatch.ranks.launch_order import VARIABLE

pytestmark = pytest.mark.ranks

EPS = 1e-6


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A collective and this rank's input."""

    name: str
    x: Tensor
    call: Call
    torchs: Call | None


def cases(group: CommGroup, *, complex_too: bool = False) -> list[Case]:
    made: list[Case] = []
    for each in collectives(group):
        for dtype in (torch.float64, torch.complex128)[: 1 + (complex_too and each.name == "all_reduce (5,)")]:
            x = data(10 * len(made) + group.rank, *each.shapes[group.rank], dtype=dtype)
            made.append(Case(f"{each.name} {dtype}", x, each.call, None if x.is_complex() else each.torchs))
    return made


def summed_over_ranks(x: Tensor) -> float:
    """The sum of every rank's number, without what is tested."""
    total = x.detach().clone().double().reshape(1)
    dist.all_reduce(total)
    return total.item()


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum()


def loss_of(call: Call, rank: int) -> Callable[[Tensor], Tensor]:
    """Another one on every rank, and not linear."""

    def loss(x: Tensor) -> Tensor:
        y = call(x)
        weights = data(500 + rank, *y.shape, dtype=y.dtype)
        return inner(weights, y.sin()) + inner(y, y) * (0.3 + rank)

    return loss


def slope(f: Callable[[Tensor], Tensor], x: Tensor, along: Tensor) -> float:
    """Of the sum of every rank's `f`, as all ranks' inputs move along their `along`."""
    with torch.no_grad():
        return (summed_over_ranks(f(x + EPS * along)) - summed_over_ranks(f(x - EPS * along))) / (2 * EPS)


def gradient(f: Callable[[Tensor], Tensor], x: Tensor, **options: bool) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(f(x), x, **options)
    return found


# --------------------------------------------------------------------------------------------------- the gradients


@on_ranks(2)
def test_gradients_are_torchs_and_the_slope_of_the_sum_over_ranks(rank: int, group: CommGroup) -> None:
    compared = 0
    for case in cases(group, complex_too=True):
        loss = loss_of(case.call, rank)
        found = gradient(loss, case.x)
        along = data(900 + rank, *case.x.shape, dtype=case.x.dtype)
        expected = slope(loss, case.x, along)
        assert summed_over_ranks(inner(found, along)) == pytest.approx(expected, rel=1e-6, abs=1e-7), case.name
        if case.torchs is not None:
            with warnings.catch_warnings(action="ignore"):  # torch would rather have its functional collectives used
                theirs = gradient(loss_of(case.torchs, rank), case.x)
            torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12, msg=case.name)
            compared += 1
        # A gradient that is expanded, and one that is strided.
        torch.testing.assert_close(
            gradient(lambda x, c=case: inner(c.call(x), torch.ones(())), case.x),
            gradient(lambda x, c=case: inner(torch.ones_like(y := c.call(x)), y), case.x),
            msg=case.name,
        )
        if case.x.dim() == 2:
            weights = data(700 + rank, *case.call(case.x.detach()).shape).to(case.x.dtype)
            torch.testing.assert_close(
                gradient(lambda x, c=case, w=weights: inner(w.t().contiguous(), c.call(x).t()), case.x),
                gradient(lambda x, c=case, w=weights: inner(w, c.call(x)), case.x),
                msg=case.name,
            )
    assert compared == 9


@on_ranks(2)
def test_gradients_of_gradients(rank: int, group: CommGroup) -> None:
    """The gradient of a gradient: what a gradient penalty differentiates."""
    for case in cases(group):
        loss = loss_of(case.call, rank)

        def penalty(x: Tensor, loss: Callable[[Tensor], Tensor] = loss) -> Tensor:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
            return first.square().sum()

        along = data(900 + rank, *case.x.shape)
        expected = slope(penalty, case.x, along)
        found = summed_over_ranks(inner(gradient(penalty, case.x), along))
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6), case.name


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@on_ranks(2)
def test_function_transforms(rank: int, group: CommGroup) -> None:
    for case in cases(group):
        x, along = case.x.contiguous(), data(900 + rank, *case.x.shape)
        loss = loss_of(case.call, rank)
        expected = gradient(loss, x)
        torch.testing.assert_close(torch.func.grad(loss)(x), expected, msg=case.name)
        total = summed_over_ranks(torch.func.jvp(loss, (x,), (along,))[1])
        assert total == pytest.approx(summed_over_ranks(inner(expected, along)), rel=1e-9, abs=1e-12), case.name
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, along))).tangent
        assert summed_over_ranks(tangent) == pytest.approx(total, rel=1e-9, abs=1e-12), case.name
        several = torch.stack([x, 2 * x, x.cos()], 1) if x.dim() else torch.stack([x, 2 * x, x.cos()])
        place = 1 if x.dim() else 0
        torch.testing.assert_close(
            torch.func.vmap(case.call, in_dims=place, out_dims=0)(several),
            torch.stack([case.call(part) for part in several.unbind(place)]),
            msg=case.name,
        )
    x = data(rank, 2, 3)
    jacobian = torch.func.jacrev(lambda x: ubatch.all_gather(x, group))(x)
    assert jacobian.shape == (4, 3, 2, 3)
    own = jacobian[2 * rank : 2 * rank + 2].reshape(6, 6)
    assert torch.equal(own, 2 * torch.eye(6, dtype=torch.float64)), "of the sum over both ranks, that have it twice"


# ------------------------------------------------------------------------------------------------------- a module


@on_ranks(2)
def test_a_sharded_module_has_the_gradients_of_the_whole_one(rank: int, group: CommGroup) -> None:
    x = data(3, 6, 8)
    whole, part = Mlp(None), Mlp(group)
    whole(x).square().sum().backward()
    expected = [parameter.grad.chunk(group.size, dim)[rank] for parameter, dim in ((whole.up, 1), (whole.down, 2))]
    wrapper = ubatch.UBatchWrapper(part, ubatch.UBatchConfig(dbo_prefill_token_threshold=64, group=group))
    for model in (part, wrapper):  # which runs the module whole
        model.zero_grad()
        (model(x).square().sum() / group.size).backward()  # all ranks compute the same loss
        torch.testing.assert_close([part.up.grad, part.down.grad], expected, rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------------------ other threads, other ranks, refusals


def in_a_fresh_thread(body: Callable[[], object]) -> None:
    """Where none of the caller's contextvars are, as in autograd's threads of a device."""
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(contextvars.Context().run, body).result()


def led_backward(rank: int, world_size: int) -> None:
    os.environ[VARIABLE] = "1"
    voting, other = (CommGroup.from_process_group(timeout_s=20.0) for _ in range(2))
    x = data(rank, 2, 3).requires_grad_()
    with voting.step():
        y = ubatch.all_gather(x, other, name="mine")
        order = voting.usable_connection().order
        assert order.launches == ["no lane: mine float64 [*, 3]"]
        in_a_fresh_thread(y.square().sum().backward)
        assert order.launches[1:] == ["no lane: gradient of mine float64 [*, 3]"]
    torch.testing.assert_close(x.grad, 4 * x.detach())

    z = ubatch.all_reduce(x, other).sum()
    with voting.step():
        y = ubatch.all_reduce(x, other).sum()
    for group in (voting, other):
        group.reset()
    x.grad = None
    in_a_fresh_thread((y + z).backward)  # what led then is gone
    torch.testing.assert_close(x.grad, torch.full_like(x, 4.0))


def test_the_backward_belongs_to_the_step_of_its_forward_in_any_thread() -> None:
    run_ranks(led_backward, 2)


@on_ranks(2, timeout_s=1.0)
def test_a_rank_that_runs_no_backward_is_missed(rank: int, group: CommGroup) -> None:
    x = data(rank, 3).requires_grad_()
    y = ubatch.all_reduce(x, group)
    if rank == 0:
        with pytest.raises(ubatch.TransferTimeout, match=r"'gradient of all_reduce' longer than 1\.0 s"):
            y.sum().backward()
    dist.barrier()
    group.reset()
    loss = ubatch.all_reduce(x, group)
    (loss.sum() if rank == 0 else 0 * loss.sum()).backward()  # every rank's loss depends on it
    assert torch.equal(x.grad, torch.ones_like(x))


def sizes_are_kept(group: CommGroup) -> None:
    """A caller that uses its lists again for the next layer does not change the gradient of this one."""
    rank = group.rank
    received, sent = ([1, 3], [1, 0]) if rank == 0 else ([0, 2], [3, 2])
    x = data(rank, sum(sent), 2).requires_grad_()
    y = ubatch.all_to_all_single(x, group, received, sent)
    received.clear()
    sent.clear()
    rows = [1, 3]
    z = ubatch.all_gather(x[: rows[rank]], group, sizes=rows)
    rows.clear()
    (y.sum() + 0 * z.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@on_ranks(2)
def test_what_has_no_gradient_is_refused(rank: int, group: CommGroup) -> None:
    x = data(rank, 4, 2).requires_grad_()
    sizes_are_kept(group)
    launches: Sequence[Any] = (
        ubatch.launch_all_reduce,
        ubatch.launch_all_gather,
        ubatch.launch_reduce_scatter,
        ubatch.launch_all_to_all_single,
    )
    for launch in launches:
        with pytest.raises(GradientError, match=r"\(4, 2\) that requires grad .* no gradient\. Use all_reduce"):
            launch(x, group)
        with pytest.raises(GradientError, match=r"belongs to torch\.func's transform Jvp"):
            torch.func.jvp(lambda x, go=launch: go(x, group).wait(), (x.detach(),), (x.detach(),))
        with forward_ad.dual_level(), pytest.raises(GradientError, match="forward-mode gradients"):
            launch(forward_ad.make_dual(x.detach(), x.detach()), group)
        with forward_ad.dual_level():
            assert launch(x.detach(), group).wait().dtype == x.dtype
        with torch.no_grad():
            assert not launch(x, group).wait().requires_grad

    # Numbers that nobody differentiates, and gradients that nobody sums.
    assert ubatch.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]
    small = x.to(torch.float8_e4m3fn)
    assert small.requires_grad
    gathered = ubatch.all_gather(small, group)
    with pytest.raises(ubatch.ConfigError, match="float8_e4m3fn travels, but nobody sums it"):
        gathered.double().sum().backward()
    swapped = ubatch.all_to_all_single(small, group)
    swapped.double().sum().backward()  # it only moves
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not ubatch.all_gather(small.detach(), group).requires_grad
