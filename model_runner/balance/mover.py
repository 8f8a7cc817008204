"""Brings the experts of a running model to another placement, one layer after the other; no step waits for it.

    begin        an order: a placement, and the layers that change
    fill_gap     where a step waits for a transfer and computes nothing: the exchange of the current layer goes on,
                 into a staging buffer. All gaps of a step together launch at most one round
    tell         before every vote: tells the other ranks how far this one has come. If the step before has launched no
                 round, because its transfers had arrived in time or the last round had not, the exchange goes on here
    heard        after every vote: if every rank has its layer in staging, all of them switch to it before this step

    rank 0    | step .. round 1 .. | step .. round 2 .. | step .. | switch, step
    rank 1    | step .. round 1 .. | step .. round 2 .. | step .. | switch, step
                    ^ in its gaps                 both are staged ^

A rank's weights change only when all ranks have what they need of that layer, so what is sent is always that of the
placement in force. Experts are never in two places of which only one counts: slots and `ExpertMap` change together, in
the order of the forward stream.

Every expert is sent with a checksum. If a rank fails (a checksum, a transfer, or no progress within the time-out), it
says so in its next vote, and all ranks give the order up: the layers that were switched stay so, the others keep their
experts. The exchange of the layer that was given up still runs to its end, as the next order's transfers come behind
it; what arrives is dropped. A failed transfer loses the channel: all ranks drop their orders, and refuse later ones
until the group is reset.

On a GPU weights travel over pinned host memory: NCCL beside NCCL or DeepEP may hang (vLLM issue 33176).
"""

import logging
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import nn

from model_runner.balance.carrier import Carrier, ChannelLost, Layer
from model_runner.balance.slots import SlotStore
from moe import EmulatedLink, ExpertMap, ExpertPlacement, FusedExperts, FusedMoEModularKernel
from moe.balance import EplbConfig, with_layers
from ubatch import CommGroup, ConfigError, UBatchError
from ubatch.streams import StreamBackend, make_streams

_logger = logging.getLogger(__name__)

_STATES = 16
"""A vote carries `number * _STATES + state`."""
_GPU_STEPS = 4
"""Steps of a round on a GPU: its copies to and from the host end in later ones."""
_AWAY_S = 1.0
"""Between two steps at most this counts towards the time-out: ranks may have paused."""


class MoveState(IntEnum):
    """How far an order has come on a rank; from `TIMEOUT` on, why it failed there."""

    NONE = 0
    MOVING = 1
    STAGED = 2
    TIMEOUT = 3
    CHECKSUM = 4
    TRANSPORT = 5
    REFUSED = 6


@dataclass(frozen=True)
class MoveNews:
    """What has become of an order, since the last news.

    Attributes:
        number: of the order.
        layers: those that were switched, in order.
        num_bytes: what was sent between ranks for them.
        over: whether the order has ended.
        failure: why it was given up (`MoveState`, in lower case); empty if it was not.
    """

    number: int
    layers: tuple[int, ...] = ()
    num_bytes: int = 0
    over: bool = False
    failure: str = ""


def _failure(number: int, why: MoveState) -> MoveNews:
    return MoveNews(number, over=True, failure=why.name.lower())


@dataclass
class _Order:
    number: int
    placement: ExpertPlacement
    layers: deque[int]
    given_up: bool = False


class Mover:
    """The experts of one rank, which change places with those of others. Every rank of the group must make it.

    Args:
        kernels: of all MoE layers. Those without an `ExpertMap` get one.
        placement: where experts are.
        group: the ranks, which vote before every step.
        device: of the weights.
        link: an emulated link to send over; None for the real one.
        streams: of the device; its own by default.
        bytes_per_step: most bytes that this rank sends, and receives, in a step.
        checksums: whether experts are checked when they have arrived.
        timeout_s: how long an order may make no progress while steps run, in seconds.

    Attributes:
        placement: where experts are now.
        expert_bytes: of an expert in the largest layer.
        staging_bytes: of the buffers that experts travel in.
        weight_bytes: of this rank's experts, in all layers.

    Raises:
        ConfigError: weights cannot move, or the ranks keep them in different layouts.
        RuntimeError: the ranks did not connect.
    """

    def __init__(
        self,
        kernels: Sequence[FusedMoEModularKernel],
        placement: ExpertPlacement,
        group: CommGroup,
        device: torch.device,
        *,
        link: EmulatedLink | None = None,
        streams: StreamBackend | None = None,
        bytes_per_step: int = 1 << 20,
        checksums: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.placement = placement
        self._group, self._connection, self._timeout_s = group, group.usable_connection(), timeout_s
        self._slots = SlotStore([_experts_of(kernel) for kernel in kernels])
        if not group.same(self._slots.layout):
            raise ConfigError(
                "the ranks keep their experts in different layouts, so experts cannot change places. Name the same "
                "moe_backend on all, on processors of one kind."
            )
        self._maps: list[ExpertMap] = []
        for number, kernel in enumerate(kernels):
            if kernel.expert_map is None:
                kernel.expert_map = ExpertMap(placement.dispatch_table(number, group.rank), device)
            self._maps.append(kernel.expert_map)
        how = make_streams(device) if streams is None else streams
        self._carrier = Carrier(self._slots, group, device, link, how, bytes_per_step, checksums=checksums)
        self.expert_bytes, self.staging_bytes = max(self._slots.slot_bytes), self._carrier.nbytes
        self.weight_bytes = sum(n * size for n, size in zip(self._slots.slots, self._slots.slot_bytes, strict=True))

        self._orders: deque[_Order] = deque()
        self._layer: Layer | None = None
        self._failed = MoveState.NONE  # why the current order failed here, if not for the channel
        self._lost = False  # whether the channel has failed, here or on a rank that has told so
        self._given_up = 0
        self._idle_s, self._seen, self._rounds = 0.0, 0.0, -1
        self._launched = 0  # rounds launched before this step
        self._news: list[MoveNews] = []

    @property
    def busy(self) -> bool:
        """Whether an order is under way, or the exchange of one that was given up: neither goes on without steps."""
        return bool(self._orders)

    def begin(self, number: int, placement: ExpertPlacement, layers: Sequence[int] | None = None) -> None:
        """Begin to move. Every rank is given the same orders, in the same order, though not before the same step.

        Args:
            number: of the order, above those of all earlier ones.
            placement: where experts are to be. Slots that are idle stay so, and the others do not become idle.
            layers: the layers that change, in the order in which they do; all that differ by default.
        """
        differ = np.flatnonzero((placement.experts != self.placement.experts).any(axis=1)) if layers is None else layers
        alike = placement.experts.shape == self.placement.experts.shape
        if not alike or ((placement.experts < 0) != (self.placement.experts < 0)).any():
            _logger.error("rearrangement %d is refused: it fills other slots than the placement in force", number)
            self._news.append(_failure(number, MoveState.REFUSED))
            return
        order = _Order(number, placement, deque(int(layer) for layer in differ), number <= self._given_up)
        if order.layers and not self._lost:
            self._orders.append(order)
            self._idle_s, self._seen = 0.0, time.monotonic()
        elif not order.given_up:
            self._news.append(_failure(number, MoveState.TRANSPORT) if order.layers else MoveNews(number, over=True))

    def tell(self) -> int:
        """Begin a step: say how far this rank is, `Offer.moving` of its vote. Goes on, without waiting, if the step
        before has launched nothing.

        Raises:
            GroupBroken: a rank failed since the group's last `reset()`.
            UBatchError: it failed while ranks switched, so that they have different placements.
        """
        self._follow_group()
        if not self._orders:
            return 0
        if self._carrier.launches == self._launched:
            self._go_on()
        self._launched = self._carrier.launches
        if self._lost:
            return self._orders[0].number * _STATES + MoveState.TRANSPORT
        order = self._order
        if order is None:
            return 0
        staged = self._layer is not None and self._layer.staged and self._layer.number == order.layers[0]
        return order.number * _STATES + (self._failed or (MoveState.STAGED if staged else MoveState.MOVING))

    def fill_gap(self) -> None:
        """Go on, without waiting, while a step waits: see `ubatch.ranks.in_gaps`."""
        if self._orders and self._carrier.launches == self._launched:
            self._go_on()

    def heard(self, moving: Sequence[int]) -> None:
        """Handle what all ranks have told in a vote: switch, or give up; on all ranks before the same step.

        Call it with the step's stream current.
        """
        if not any(moving):
            return
        for rank, told in enumerate(moving):
            number, state = divmod(told, _STATES)
            if state == MoveState.TRANSPORT:
                self._lose_channel(f"a transfer has failed on rank {rank}")
                self._drop_orders()
                return
            if state >= MoveState.TIMEOUT and number > self._given_up:
                self._give_up(number, MoveState(state), rank)
                return
        order, layer = self._order, self._layer
        if order is not None and layer is not None and set(moving) == {order.number * _STATES + MoveState.STAGED}:
            self._switch(order, layer)

    def take_news(self) -> list[MoveNews]:
        """What has happened since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def _order(self) -> _Order | None:
        return next((order for order in self._orders if not order.given_up), None)

    # -- on this rank -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._failed or self._lost:
            return
        head = self._orders[0]
        if self._layer is None:
            self._layer = self._carrier.load(head.layers[0], self.placement, head.placement)
            self._rounds = -1
        layer = self._layer
        if layer.staged and not head.given_up:
            return
        try:
            over = layer.staged or self._carrier.go_on(layer)
        except ChannelLost as error:
            self._lose_channel(str(error))
            return
        if over and head.given_up:
            self._orders.popleft()
            self._layer = None
        elif over and not self._carrier.is_right():
            self._failed = MoveState.CHECKSUM
        elif over:
            layer.staged = True
        if self._order is not None:
            self._watch_time(layer)

    def _follow_group(self) -> None:
        """After the group's `reset`: orders are dropped, and the channel is made anew."""
        connection = self._group.usable_connection()
        if connection is self._connection:
            return
        if not self._group.same(zlib.crc32(self.placement.experts.tobytes())):
            raise UBatchError("a rank failed while experts switched: the ranks have different placements. Load anew.")
        self._carrier.connect(self._group)
        self._connection, self._lost = connection, False
        self._drop_orders()

    def _lose_channel(self, why: str) -> None:
        if not self._lost:
            _logger.error("experts cannot be moved any more until the engines start again: %s", why)
        self._lost = True

    def _drop_orders(self) -> None:
        """End all orders, as on all other ranks; what is on its way is lost."""
        dropped, self._orders = self._orders, deque()
        self._layer, self._failed = None, MoveState.NONE
        self._news += [_failure(order.number, MoveState.TRANSPORT) for order in dropped if not order.given_up]

    def _watch_time(self, layer: Layer) -> None:
        now = time.monotonic()
        self._idle_s += min(now - self._seen, _AWAY_S)
        self._seen = now
        if layer.rounds != self._rounds:
            self._idle_s, self._rounds = 0.0, layer.rounds
        if self._idle_s > self._timeout_s and not self._failed:
            self._failed = MoveState.TIMEOUT

    # -- together -----------------------------------------------------------------------------------------------

    def _switch(self, order: _Order, layer: Layer) -> None:
        self._carrier.unload(layer, self._maps[layer.number])
        self.placement = with_layers(self.placement, order.placement, np.array([layer.number]))
        self._layer = None
        order.layers.popleft()
        if not order.layers:
            self._orders.popleft()
        self._news.append(MoveNews(order.number, (layer.number,), layer.num_bytes, over=not order.layers))

    def _give_up(self, number: int, why: MoveState, rank: int) -> None:
        self._given_up, self._failed = number, MoveState.NONE
        order = self._order
        if order is not None and order.number <= number:
            order.given_up = True
        news = _failure(number, why)
        where = news.failure, rank
        _logger.error("rearrangement %d is given up (%s on rank %d): experts stay where they are", number, *where)
        self._news.append(news)


def make_mover(
    model: nn.Module,
    placement: ExpertPlacement | None,
    group: CommGroup | None,
    device: torch.device,
    config: EplbConfig,
    *,
    link: EmulatedLink | None = None,
    streams: StreamBackend | None = None,
) -> Mover:
    """The mover of a model's experts. Every rank of the group must call this.

    Args:
        placement: where experts are; None for a model without placed experts.
        config: how fast they may move.
        Others: see `Mover`.

    Raises:
        ConfigError: there is nothing to balance: one rank, or no experts; or see `Mover`.
    """
    if group is None or group.size == 1:
        raise ConfigError("enable_eplb: one rank has all experts, so there is nothing to balance. Use several ranks.")
    kernels = [each for each in model.modules() if isinstance(each, FusedMoEModularKernel)]
    if placement is None or len(kernels) != placement.num_layers:
        raise ConfigError("enable_eplb: this model has no experts that can be placed. Leave it out.")
    total = sum(tensor.nbytes for kernel in kernels for tensor in _experts_of(kernel).slot_tensors())
    return Mover(
        kernels,
        placement,
        group,
        device,
        link=link,
        streams=streams,
        bytes_per_step=config.bytes_per_step(int(-group.least(-total)), 1 if device.type == "cpu" else _GPU_STEPS),
        checksums=config.move_checksums,
        timeout_s=group.timeout_s,
    )


def _experts_of(kernel: FusedMoEModularKernel) -> FusedExperts:
    """The weights of a layer.

    Raises:
        ConfigError: they are not of this project's experts.
    """
    if not isinstance(kernel.experts, FusedExperts):
        raise ConfigError(f"{type(kernel.experts).__name__} are no FusedExperts: it is not known what can be moved.")
    return kernel.experts
