"""Operations of one lane in a model's MoE layers, for the simulator: the points of the modular kernel, in order.

    prepare | core | dispatch.0 dispatch.1 .. | wait 0, experts 0, combine.0, wait 1, experts 1, combine.1 .. | wait all

With chunks, all chunks of the dispatch are launched at once, so that the link is never idle while there is data to
send, and a chunk's combine is launched as soon as its experts are done. There is no point between chunks: with one, the
other lane would take over just when this lane's next chunk has arrived (0.3 : 0.7 on 2 lanes x 2 chunks, 0.95 of the
bound instead of 0.99).

A rank whose experts get more tokens than others' (`RankLoad`) computes for longer, and its end of the link is busy for
longer; all ranks together are simulated by `simulate_ranks`.

With tensor-parallel attention, two more transfers come first:

    norm, attn_gather | prepare | core, attn_scatter | add, norm, router, dispatch.0 ..

This module imports neither torch nor threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ubatch.errors import ConfigError
from ubatch.schedules.schedule import Point, Schedule, SharedExpert
from ubatch.schedules.simulator import Compute, Launch, Op, Pass, Wait


@dataclass(frozen=True)
class LayerTimes:
    """Seconds that one lane spends in one MoE layer, all chunks together.

    Attributes:
        attn_prepare: norm and qkv projection.
        attn_core: attention, output projection and router.
        dispatch, combine: time on the link.
        shared: the shared expert.
        attn_gather, attn_scatter: time on the link of tensor-parallel attention; 0 without it, and then the lane passes
            no points for them.

    Raises:
        ConfigError: a negative time.
    """

    attn_core: float
    experts: float
    dispatch: float
    combine: float
    attn_prepare: float = 0.0
    shared: float = 0.0
    attn_gather: float = 0.0
    attn_scatter: float = 0.0

    def __post_init__(self) -> None:
        for name in _TIMES:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"LayerTimes.{name} must be at least 0 seconds, not {getattr(self, name)}.")

    @property
    def compute_s(self) -> float:
        """Total compute time in seconds."""
        return self.attn_prepare + self.attn_core + self.experts + self.shared

    @property
    def communication_s(self) -> float:
        """Total time on the link in seconds."""
        return self.dispatch + self.combine + self.attn_gather + self.attn_scatter


_TIMES = tuple(field.name for field in fields(LayerTimes))


@dataclass(frozen=True)
class UnevenTimes(LayerTimes):
    """Times of a transport whose chunks are of unequal size.

    A transport that sends each token once, even if several chunks need it, has its largest dispatch in the first chunk
    and its largest combine in the last (`moe.All2AllTraits.chunk_shares`).

    Attributes:
        dispatch_shares, combine_shares: each chunk's share of `dispatch` and `combine`.

    Raises:
        ConfigError: shares that are negative or do not sum to 1.
    """

    dispatch_shares: tuple[float, ...] = (1.0,)
    combine_shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dispatch_shares", "combine_shares"):
            shares = getattr(self, name)
            if min(shares, default=-1.0) < 0 or abs(sum(shares) - 1) > 1e-6:
                raise ConfigError(f"UnevenTimes.{name} must be at least 0 each and 1 together, not {shares}.")


@dataclass(frozen=True)
class RankLoad:
    """One rank's part in one MoE layer, over the mean of the ranks; 1 is balanced.

    Attributes:
        experts: tokens that its experts compute.
        received: what it receives in the dispatch, and sends in the combine.
        sent: what it sends in the dispatch, and receives in the combine.

    Raises:
        ConfigError: a negative value.
    """

    experts: float = 1.0
    received: float = 1.0
    sent: float = 1.0

    def __post_init__(self) -> None:
        if min(self.experts, self.received, self.sent) < 0:
            raise ConfigError(f"a rank's load must be at least 0, not {self}.")


_BALANCED = RankLoad()


def rank_loads(tokens: Sequence[float]) -> list[RankLoad]:
    """Every rank's load in one layer, if all ranks have equally many tokens and each of a token's choices travels.

    A rank sends to the others what does not stay with its own experts, so the busiest one sends least.

    Args:
        tokens: that each rank's experts compute.

    Raises:
        ConfigError: there are fewer than two ranks, or a negative number.
    """
    if len(tokens) < 2 or min(tokens) < 0:
        raise ConfigError(f"loads are tokens of two ranks or more, 0 at least, not {list(tokens)}.")
    mean, others = sum(tokens) / len(tokens), len(tokens) - 1
    factors = [each / mean if mean else 1.0 for each in tokens]
    return [RankLoad(factor, factor, (others + 1 - factor) / others) for factor in factors]


def times_of_layers(times: LayerTimes | Sequence[LayerTimes], layers: int) -> list[LayerTimes]:
    """One entry per layer; see `layer_program`.

    Raises:
        ConfigError: there are no times.
    """
    pattern = [times] if isinstance(times, LayerTimes) else times
    if not pattern:
        raise ConfigError("stage times of no layer were given; give those of at least one.")
    return [pattern[layer % len(pattern)] for layer in range(layers)]


def layer_program(
    times: LayerTimes | Sequence[LayerTimes], layers: int, schedule: Schedule, loads: Sequence[RankLoad] = ()
) -> list[Op]:
    """Operations of one lane in `layers` MoE layers.

    Args:
        times: of every layer, with balanced experts; or of several layers in order, if they differ, as where some have
            linear attention. They then repeat.
        loads: of this rank, in every layer; balanced if not given.

    Raises:
        ConfigError: there are no times, there are loads of other layers, or the schedule is signalled. Its combine
            travels while the lane still computes it, which the simulator does not model: the start has not been
            measured, and on a GPU both share the SMs.
    """
    if schedule.signalled:
        raise ConfigError(
            f"schedule {schedule.name!r} is signalled: its combine begins inside the down projection, which the "
            "simulator does not model. Simulate it without signalled."
        )
    if loads and len(loads) != layers:
        raise ConfigError(f"loads of {len(loads)} layers were given for {layers}. Give those of every layer.")
    program: list[Op] = []
    for layer, own in enumerate(times_of_layers(times, layers)):
        load = loads[layer] if loads else _BALANCED
        shared: dict[SharedExpert, list[Op]] = {where: [] for where in SharedExpert}
        shared[schedule.shared_expert].append(Compute(own.shared))
        program += _tensor_parallel(own.attn_gather, layer, Point.ATTN_GATHER)
        program += [Compute(own.attn_prepare), Pass(Point.ATTN_PREPARE), Compute(own.attn_core)]
        program += [*_tensor_parallel(own.attn_scatter, layer, Point.ATTN_SCATTER), Pass(Point.SELECT)]
        program += [*_dispatches(own, layer, schedule, load), *shared[SharedExpert.DISPATCH], Pass(Point.DISPATCH)]
        program += [*_chunks(own, layer, schedule, load), *shared[SharedExpert.COMBINE], Pass(Point.COMBINE)]
        program += [*shared[SharedExpert.COMBINE_RETURN]]
        program += [Wait(f"combine.{layer}.{chunk}") for chunk in range(schedule.chunks)]
        program += [Pass(Point.OUTPUT), Pass(Point.LAYER)]
    return program


def _tensor_parallel(seconds: float, layer: int, point: Point) -> list[Op]:
    """A gather or scatter; the lane waits for it as soon as it has the baton again."""
    key = f"{point}.{layer}"
    return [Launch(key, seconds), Pass(point), Wait(key)] if seconds else []


def _dispatches(times: LayerTimes, layer: int, schedule: Schedule, load: RankLoad) -> list[Op]:
    """The dispatches of all chunks; only the first one's wait is a receive hook."""
    parts = enumerate(_shares(times, "dispatch_shares", _dispatch_chunks(schedule)))
    return [
        _launch(f"dispatch.{layer}.{chunk}", times.dispatch * share, load.sent, load.received, hooked=not chunk)
        for chunk, share in parts
    ]


def _launch(key: str, seconds: float, sent: float, received: float, *, hooked: bool) -> Launch:
    """A transfer that takes `seconds` where ranks are balanced."""
    return Launch(key, seconds * sent, None if sent == received else seconds * received, hooked=hooked)


def _chunks(times: LayerTimes, layer: int, schedule: Schedule, load: RankLoad) -> list[Op]:
    """Experts and combine of each chunk. The combines' waits are receive hooks, unless the shared expert runs
    before."""
    hooked = schedule.shared_expert is not SharedExpert.COMBINE_RETURN
    ops: list[Op] = []
    for chunk, share in enumerate(_shares(times, "combine_shares", schedule.chunks)):
        if chunk < _dispatch_chunks(schedule):
            ops.append(Wait(f"dispatch.{layer}.{chunk}"))
        ops.append(Compute(load.experts * times.experts / schedule.chunks))
        combine = times.combine * share
        ops.append(_launch(f"combine.{layer}.{chunk}", combine, load.received, load.sent, hooked=hooked))
    return ops


def _shares(times: LayerTimes, name: str, chunks: int) -> tuple[float, ...]:
    if not isinstance(times, UnevenTimes):
        return (1.0 / chunks,) * chunks
    given: tuple[float, ...] = getattr(times, name)
    if len(given) != chunks:
        raise ConfigError(f"UnevenTimes.{name} are {len(given)}, but the schedule has {chunks} chunks there.")
    return given


def _dispatch_chunks(schedule: Schedule) -> int:
    return schedule.chunks if schedule.chunk_dispatch else 1
