"""One rank's models with skewed experts: the same weights and tokens, with experts in different places.

    without   experts in the order of their ids
    with      experts where the planner puts them, for the loads of other batches; they have moved there between steps
    perfect   as with, but every token's routing is replaced by one that gives all experts equally many tokens

The last two share a runner: equal runners differ by a percent or two, as their weights lie elsewhere in memory.

A bias on every router's logits makes experts popular by Zipf's law. Which expert is how popular is random in every
layer, but so that the busiest rank has the load that was asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model_runner import ModelRunner, Step
from model_runner.balance import MoveNews
from moe import EmulatedLink, ExpertLoads, ExpertPlacement, FusedMoEModularKernel, Router
from moe.balance import EplbConfig, Floats, Ints, plan_placement
from serving.workbench.bench.step_setting import StepOptions, StepSetting, open_batch
from ubatch import CommGroup, Schedule, UBatchError
from ubatch.schedules import SERIAL

WINDOW = 8
"""Batches that placements are planned for; none of them is measured."""
_SHORT = 8
"""Tokens of a step that only moves experts."""
_NEAR = 0.02
"""How near a layer's balancedness comes to the one that was asked for."""
_TRIES = 5_000


@dataclass(frozen=True)
class Skew:
    """How skewed the routers are.

    Attributes:
        balancedness: mean / busiest rank, of experts in the order of their ids, in every layer.
        exponent: of the experts' popularity.
    """

    balancedness: float = 0.65
    exponent: float = 1.0


class UniformRouter:
    """Replaces the choice of a router, after it has been made, by one that visits all experts equally often.

    Args:
        router: gives the weights.
        num_experts: experts of the layer; a multiple of those that a token visits.
        seed: of the choice, which is the same in every step.
    """

    def __init__(self, router: Router, num_experts: int, seed: int) -> None:
        self._router, self._num_experts, self._seed = router, num_experts, seed
        self._ids: dict[tuple[int, int], Tensor] = {}

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self._router(router_logits)
        rows, top_k = ids.shape
        if (rows, top_k) not in self._ids:
            random = np.random.default_rng((self._seed, rows))
            turns = -(-rows * top_k // self._num_experts)
            order = random.permuted(np.tile(np.arange(self._num_experts), (turns, 1)), axis=1)
            self._ids[rows, top_k] = torch.from_numpy(order.ravel()[: rows * top_k].reshape(rows, top_k)).contiguous()
        return weights, self._ids[rows, top_k]


class UniformSetting(StepSetting):
    """Steps with every router replaced by a `UniformRouter`, on a runner that other settings may use as it is."""

    def __init__(self, runner: ModelRunner, batch: Step, link: EmulatedLink) -> None:
        super().__init__(runner, batch, link)
        self._layers, experts = sparse_layers(runner), runner.config.num_experts
        self._uniform = [UniformRouter(mlp.router, experts, number) for number, mlp in enumerate(self._layers)]

    def step(self, schedule: Schedule) -> Tensor:
        with _routed(self._layers, self._uniform):
            return super().step(schedule)


@contextmanager
def _routed(layers: Sequence[Any], routers: Sequence[Router]) -> Iterator[None]:
    """Within, MoE layers have these routers."""
    own = [mlp.router for mlp in layers]
    try:
        for mlp, router in zip(layers, routers, strict=True):
            mlp.router = router
        yield
    finally:
        for mlp, router in zip(layers, own, strict=True):
            mlp.router = router


class Rearranger:
    """Moves the experts of one rank's runner, with all ranks; every rank makes one and calls the same.

    Attributes:
        number: orders so far.

    Raises:
        UBatchError: the runner was made without `enable_eplb`.
    """

    def __init__(self, runner: ModelRunner, link: EmulatedLink) -> None:
        if runner.mover is None:
            raise UBatchError("the runner cannot move experts: it was made without enable_eplb.")
        self._runner, self._link = runner, link
        self.mover, self.number = runner.mover, 0

    def begin(self, placement: ExpertPlacement, layers: Sequence[int] | None = None) -> None:
        """Order a placement; steps bring it about."""
        self.number += 1
        self.mover.begin(self.number, placement, layers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, steps do not move experts."""
        self._runner.mover = None
        try:
            yield
        finally:
            self._runner.mover = self.mover

    def finish(self) -> list[MoveNews]:
        """Run short steps until all experts are in their places; what has moved since `news`."""
        with open_batch(self._runner, [[0] * _SHORT], self._link) as short:
            while self.mover.busy:
                short.step(SERIAL)
        return self.news()

    def news(self) -> list[MoveNews]:
        """What has moved since the last call.

        Raises:
            UBatchError: an order was given up.
        """
        news = self.mover.take_news()
        for each in news:
            if each.failure:
                raise UBatchError(f"experts were not moved: {each.failure}.")
        return news


@dataclass
class SkewedModels:
    """One rank's settings for steps, by name, over one link.

    Attributes:
        loads: `[L, E]`: tokens of all ranks in the batch that is measured, for every setting.
        rearranger: moves the experts of `with`.
        biases: `[L, E]`: of all routers' logits.
    """

    settings: Mapping[str, StepSetting]
    loads: Mapping[str, Floats]
    link: EmulatedLink
    rearranger: Rearranger
    biases: Tensor

    def balancedness(self, name: str) -> float:
        """Mean over the layers."""
        return float(placement_of(self.settings[name]).balancedness(self.loads[name]).mean())


@contextmanager
def open_skewed(rank: int, options: StepOptions, model: Path, skew: Skew, eplb: EplbConfig) -> Iterator[SkewedModels]:
    """The three settings; every rank calls it. The link starts infinitely fast.

    Args:
        eplb: settings of `with`.
    """
    group, link = CommGroup.from_process_group(timeout_s=300.0), options.link()

    def steps_of(
        runner: ModelRunner, batch: int = 0, kind: type[StepSetting] = StepSetting
    ) -> AbstractContextManager[StepSetting]:
        prompts = options.prompts(runner.config.vocab_size, batch * group.size + rank)
        return open_batch(runner, prompts, link, kind)

    def loads_of_batch(batch: int) -> Floats:
        with steps_of(plain, batch) as other:
            return loads_of(other)

    with ExitStack() as stack:
        enter = stack.enter_context
        balanced = enter(options.runner(model, group, link, enable_eplb=True, eplb_config=eplb))
        plain = enter(options.runner(model, group, link, experts_backend=balanced.experts_backend))
        settings = {
            "without": enter(steps_of(plain)),
            "with": enter(steps_of(balanced)),
            "perfect": enter(steps_of(balanced, kind=UniformSetting)),
        }
        biases = _skewed_biases(plain, settings["without"], skew)
        for runner in (plain, balanced):
            set_biases(runner, biases)
        window = np.sum([loads_of_batch(batch) for batch in range(1, 1 + WINDOW)], axis=0)
        rearranger = Rearranger(balanced, link)
        rearranger.begin(plan_placement(window, placement_of(settings["with"])))
        rearranger.finish()
        loads = {name: loads_of(each) for name, each in settings.items()}
        yield SkewedModels(settings, loads, link, rearranger, biases)


def prompts_of(setting: StepSetting) -> list[list[int]]:
    """The prompts of its steps."""
    requests = [share.request for share in setting.batch.shares]
    return [request.token_ids[: request.num_prompt_tokens] for request in requests]


def placement_of(setting: StepSetting) -> ExpertPlacement:
    """Where the experts are now."""
    placement = setting.runner.placement
    if placement is None:
        raise UBatchError("the model has no routed experts.")
    return placement


def expert_loads(runner: ModelRunner) -> ExpertLoads:
    """What its routers have counted."""
    if runner.expert_loads is None:
        raise UBatchError("the model has no routed experts.")
    return runner.expert_loads


def on_next_ranks(placement: ExpertPlacement) -> ExpertPlacement:
    """The same experts together, but each rank's on the next one: all of them move, and the balance stays."""
    each = placement.slots_per_rank
    return replace(placement, experts=np.roll(placement.experts, each, axis=1))


def sparse_layers(runner: ModelRunner) -> list[Any]:
    """The model's MoE layers (`model_runner.decoder`'s `SparseMLP`), in order."""
    return [each for each in runner.model.modules() if isinstance(getattr(each, "kernel", None), FusedMoEModularKernel)]


def set_biases(runner: ModelRunner, biases: Tensor) -> None:
    """Set the biases of all routers' logits, `[L, E]`; in place if they have some, so that recorded steps see them."""
    for mlp, bias in zip(sparse_layers(runner), biases, strict=True):
        if mlp.gate.bias is None:
            mlp.gate.bias = nn.Parameter(bias.clone(), requires_grad=False)
        else:
            mlp.gate.bias.data.copy_(bias)


def _skewed_biases(runner: ModelRunner, setting: StepSetting, skew: Skew) -> Tensor:
    """Biases of all routers `[L, E]`, the same on every rank."""
    # With noise of Gumbel's distribution, whose deviation is 1.28, logits would choose in proportion to popularity.
    popularity = -skew.exponent * torch.arange(1, runner.config.num_experts + 1).log()
    biases = torch.tensor(_logit_spread(runner, setting))[:, None] / 1.28 * popularity
    set_biases(runner, biases)
    order = skewed_order(loads_of(setting), placement_of(setting), skew.balancedness, np.random.default_rng(0))
    return biases.gather(1, order)


def skewed_order(loads: Floats, placement: ExpertPlacement, balancedness: float, random: np.random.Generator) -> Tensor:
    """`[L, E]`: the expert whose popularity each is to have, so that every layer is as balanced as asked for.

    Orders are drawn first. If none will do, two experts of each layer change places as long as that brings it nearer.

    Args:
        loads: `[L, E]`.

    Raises:
        UBatchError: no order of many that were tried is.
    """

    def misses(orders: Ints) -> Floats:
        return np.abs(placement.balancedness(np.take_along_axis(loads, orders, axis=1)) - balancedness)

    orders = np.tile(np.arange(loads.shape[1]), (len(loads), 1))
    missed, layers = misses(orders), np.arange(len(loads))[:, None]
    for tried in range(2 * _TRIES):
        wrong = missed > _NEAR
        if not wrong.any():
            return torch.from_numpy(orders)
        others = orders.copy()
        if tried < _TRIES:
            others[wrong] = random.permuted(orders[wrong], axis=1)
        else:
            places = random.integers(loads.shape[1], size=(len(loads), 2))
            others[layers, places] = orders[layers, places[:, ::-1]]
        reached = misses(others)
        better = wrong & ((reached < missed) | (tried < _TRIES))
        orders[better], missed[better] = others[better], reached[better]
    raise UBatchError(f"no order of {loads.shape[1]} experts has a balancedness of {balancedness:g}. Ask for another.")


class _Spy:
    """A router that keeps the standard deviation of the logits that it sees."""

    def __init__(self, router: Router) -> None:
        self.router, self.spread = router, 0.0

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        self.spread = float(router_logits.std())
        return self.router(router_logits)


def _logit_spread(runner: ModelRunner, setting: StepSetting) -> list[float]:
    """The standard deviation of every layer's logits, the same on every rank."""
    layers = sparse_layers(runner)
    spies = [_Spy(mlp.router) for mlp in layers]
    with _routed(layers, spies):
        setting.step(SERIAL)
    spread = torch.tensor([spy.spread for spy in spies])
    dist.broadcast(spread, 0)
    return [float(each) for each in spread]


def loads_of(setting: StepSetting) -> Floats:
    """`[L, E]`: tokens of every expert in a step of all ranks. Every rank calls it."""
    counts = expert_loads(setting.runner).counts
    before = counts.clone()
    setting.step(SERIAL)
    loads = (counts - before).sum(dim=0)
    dist.all_reduce(loads)
    return np.asarray(loads.numpy(), dtype=np.float64)
