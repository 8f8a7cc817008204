"""Which rank holds which experts, in slots, and which slot each routed token goes to.

    expert    what the router chooses, by its id in the checkpoint
    slot      room for one expert on a rank; rank `r` of `R` has the slots `r * S` to `(r + 1) * S - 1`
    replica   a slot that holds an expert which other slots hold as well

Routers and checkpoints know experts; transports and experts back ends know slots. A layer without a placement has as
many slots as experts, each in its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ubatch import ConfigError
from ubatch.errors import cut, named_values, shown
from ubatch.process import read_yaml, write_whole

IDLE = -1
"""What a slot without an expert holds."""
MOST_ROWS = 64
"""The most rows of a dispatch table."""
_KEYS = ("num_experts", "ranks", "layers")
_SGLANG_KEY = "physical_to_logical_map"
_MOST_IN_FILE = 2**18
"""The most values in a placement's file."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def local_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """The slots that `rank` has, if each of the ranks has equally many.

    Args:
        num_experts: slots of the layer; without a placement, its routed experts.
        rank: the rank's place in the expert-parallel group.
        num_ranks: the group's size.

    Raises:
        ConfigError: the slots do not divide by the ranks, or there is no such rank.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ConfigError(f"rank {rank} is not one of {num_ranks} ranks.")
    if num_experts < 1 or num_experts % num_ranks:
        raise ConfigError(
            f"{num_experts} experts do not divide by {num_ranks} ranks. Place them in "
            f"{slots_per_rank(num_experts, num_ranks) * num_ranks} slots (ExpertPlacement.default)."
        )
    each = num_experts // num_ranks
    return range(rank * each, (rank + 1) * each)


def slots_per_rank(num_experts: int, num_ranks: int, redundant: int = 0) -> int:
    """The slots that each rank needs for all experts and `redundant` more."""
    return -(-(num_experts + redundant) // num_ranks)


def block_of(slots: Tensor, blocks: Sequence[range]) -> Tensor:
    """The index of each slot's block, in the shape and dtype of `slots`; undefined for slots outside of all blocks.

    Args:
        slots: indices among a rank's slots.
        blocks: all of the rank's slots, in order.
    """
    block = torch.zeros_like(slots)
    for each in blocks[1:]:
        block += slots >= each.start
    return block


@dataclass(frozen=True, eq=False, repr=False)
class ExpertPlacement:
    """Which expert every slot holds, in every MoE layer.

    Args:
        experts: `[L, R * S]` int64: the expert in each slot of each MoE layer, or `IDLE`. A rank's idle slots are its
            last ones.
        num_experts: routed experts of a layer, `E`.
        num_ranks: ranks that share them, `R`.

    Raises:
        ConfigError: slots do not divide by the ranks, an expert is in no slot or does not exist, or an idle slot is
            before one that holds an expert.
    """

    experts: Ints
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        experts = np.array(self.experts, dtype=np.int64)
        if experts.ndim != 2 or self.num_ranks < 1 or experts.shape[1] % self.num_ranks or not experts.size:
            raise ConfigError(
                f"a placement is [layers, slots] with equally many slots for each of {self.num_ranks} ranks, not "
                f"{list(experts.shape)}."
            )
        if self.num_experts > experts.shape[1]:
            raise ConfigError(f"{self.num_experts} experts do not fit into {experts.shape[1]} slots.")
        if experts.min() < IDLE or experts.max() >= self.num_experts:
            raise ConfigError(
                f"a placement holds expert {experts.min() if experts.min() < IDLE else experts.max()}, but the "
                f"experts are 0 to {self.num_experts - 1} (and {IDLE} is an idle slot)."
            )
        missing = np.argwhere(count_replicas(experts, self.num_experts) == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ConfigError(f"expert {expert} of MoE layer {layer} is in no slot. Every expert needs one.")
        idle = experts.reshape(len(experts), self.num_ranks, -1) == IDLE
        if (idle[:, :, :-1] & ~idle[:, :, 1:]).any():
            raise ConfigError("an idle slot is before one that holds an expert. A rank's idle slots are its last ones.")
        experts.flags.writeable = False
        object.__setattr__(self, "experts", experts)

    @classmethod
    def default(
        cls, num_layers: int, num_experts: int, num_ranks: int, redundant: int = 0, *, fill: bool = False
    ) -> ExpertPlacement:
        """Experts in the order of their ids; the first ranks hold one more if they do not divide. Replicas of the
        first experts come behind them.

        Args:
            redundant: slots beyond one per expert.
            fill: put replicas into the slots that would be idle.
        """
        each = slots_per_rank(num_experts, num_ranks, redundant)
        held = num_ranks * each if fill else num_experts + redundant
        in_order = np.arange(held) % num_experts
        one = np.full((num_ranks, each), IDLE)
        start = 0
        for rank in range(num_ranks):
            size = held // num_ranks + (rank < held % num_ranks)
            one[rank, :size] = in_order[start : start + size]
            start += size
        return cls(np.tile(one.reshape(1, -1), (num_layers, 1)), num_experts, num_ranks)

    def filled(self) -> ExpertPlacement:
        """The placement without idle slots: each gets a replica of an expert of other ranks with few replicas."""
        experts, each = self.experts.copy(), self.slots_per_rank
        for layer, slot in np.argwhere(experts == IDLE):
            row = experts[layer]
            own = row[slot // each * each : slot]
            counts = count_replicas(row[None], self.num_experts)[0]
            counts[own[own != IDLE]] += self.num_slots  # only if the rank has all experts
            row[slot] = counts.argmin()
        return replace(self, experts=experts)

    @classmethod
    def load(cls, path: str | Path, num_ranks: int | None = None) -> ExpertPlacement:
        """Read a placement from a file that `save` wrote: JSON if its name ends in `.json`, else YAML.

            num_experts: 3
            ranks: 2
            layers:                # the expert in every slot, rank after rank; -1 is an idle slot
            - [0, 1, 2, -1]
            - [2, 1, 0, 1]

        Or one of SGLang's (`--init-expert-location`): JSON with `physical_to_logical_map`, which are the layers.

        Args:
            num_ranks: ranks of a file that does not name them, as SGLang's.

        Raises:
            ConfigError: the file cannot be read, or does not hold a placement.
        """
        path = Path(path)
        values = _read_json(path) if path.suffix == ".json" else read_yaml(path, _MOST_IN_FILE)
        try:
            if _SGLANG_KEY in values and num_ranks is not None:
                experts = _rows(values[_SGLANG_KEY])
                return cls(experts, int(experts.max(initial=0)) + 1, num_ranks)
            named = named_values(values, _KEYS)
            missing = [name for name in _KEYS if name not in named]
            if missing:
                raise ConfigError(f"{missing[0]} is missing. A placement has {', '.join(_KEYS)}.")
            num_experts, ranks, layers = (named[name] for name in _KEYS)
            for name, value in (("num_experts", num_experts), ("ranks", ranks)):
                if type(value) is not int or value < 1:
                    raise ConfigError(f"{name} must be a positive integer, not {shown(value)}.")
            return cls(_rows(layers), num_experts, ranks)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the placement to a file for `load`: JSON if its name ends in `.json`, else YAML.

        Raises:
            OSError: it cannot be written.
        """
        rows = ",\n".join(f"  {row.tolist()}" for row in self.experts)
        text = f'{{"num_experts": {self.num_experts}, "ranks": {self.num_ranks}, "layers": [\n{rows}\n]}}\n'
        if Path(path).suffix != ".json":
            rows = "\n".join(f"- {row.tolist()}" for row in self.experts)
            text = f"num_experts: {self.num_experts}\nranks: {self.num_ranks}\nlayers:\n{rows}\n"
        write_whole(Path(path), text)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.experts.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots of a layer, on all ranks."""
        return int(self.experts.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Slots of a layer on each rank."""
        return self.num_slots // self.num_ranks

    @cached_property
    def replicas(self) -> Ints:
        """`[L, E]`: slots that hold each expert."""
        return count_replicas(self.experts, self.num_experts)

    def is_plain(self, layer: int) -> bool:
        """Whether slot and expert are the same in a layer, so that ids need no mapping."""
        return bool(self.num_slots == self.num_experts and (self.experts[layer] == np.arange(self.num_experts)).all())

    def held(self, layer: int, rank: int) -> Ints:
        """The experts in a rank's slots, in order, without idle ones."""
        each = self.slots_per_rank
        own = self.experts[layer, rank * each : (rank + 1) * each]
        return own[own != IDLE]

    def dispatch_table(self, layer: int, rank: int) -> Ints:
        """The slots that tokens of `rank` go to: token `t` of a batch with expert `e` goes to `table[t % W, e]`.

        An expert's tokens take turns over its replicas, so that each gets an equal share. A replica on `rank` itself
        only comes first: it gets the one token more that does not divide.

        Returns:
            `[W, E + 1]`; W is at most `MOST_ROWS`. The last column is -1, for tokens without an expert.
        """
        counts = self.replicas[layer]
        rows = min(MOST_ROWS, math.lcm(*set(counts.tolist())))
        table = np.full((rows, self.num_experts + 1), -1)
        by_expert = np.argsort(self.experts[layer], kind="stable")[self.num_slots - counts.sum() :]
        starts = counts.cumsum() - counts
        here = by_expert // self.slots_per_rank == rank
        own = np.minimum.reduceat(np.where(here, np.arange(len(here)), self.num_slots), starts) - starts
        first = np.where(own < counts, own, rank % counts)
        table[:, :-1] = by_expert[starts + (first + np.arange(rows)[:, None]) % counts]
        return table

    @cached_property
    def _shares(self) -> Floats:
        """`[L, R * S]`: the share of its expert's tokens that each slot gets, over all ranks; 0 for an idle slot."""
        expert = np.where(self.experts == IDLE, 0, self.experts)
        return np.where(self.experts == IDLE, 0.0, 1.0 / np.take_along_axis(self.replicas, expert, axis=1))

    def slot_loads(self, loads: npt.NDArray[np.generic]) -> Floats:
        """The tokens that each slot gets, by the rule of `dispatch_table`; 0 for an idle slot.

        Args:
            loads: `[..., L, E]`: tokens per layer and expert.

        Returns:
            `[..., L, R * S]` float64.
        """
        tokens: Floats = np.asarray(loads, dtype=np.float64)
        expert = np.broadcast_to(np.where(self.experts == IDLE, 0, self.experts), (*tokens.shape[:-1], self.num_slots))
        return np.asarray(np.take_along_axis(tokens, expert, axis=-1) * self._shares)

    def rank_loads(self, loads: npt.NDArray[np.generic]) -> Floats:
        """The tokens that each rank computes: `[..., L, R]` of loads `[..., L, E]`, see `slot_loads`."""
        of_slots = self.slot_loads(loads)
        by_rank = of_slots.reshape(*of_slots.shape[:-1], self.num_ranks, self.slots_per_rank)
        return np.asarray(by_rank.sum(axis=-1))

    def balancedness(self, loads: npt.NDArray[np.generic]) -> Floats:
        """`[..., L]`: mean / max over ranks of `rank_loads`; 1 is perfect, and for a layer without tokens."""
        ranks = self.rank_loads(loads)
        most = ranks.max(axis=-1)
        return np.divide(ranks.mean(axis=-1), most, out=np.ones_like(most), where=most > 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        same = (self.num_experts, self.num_ranks) == (other.num_experts, other.num_ranks)
        return same and np.array_equal(self.experts, other.experts)

    def __repr__(self) -> str:
        """Short, and different for different placements: nodes and kept models compare it."""
        digest = hashlib.sha256(self.experts.tobytes()).hexdigest()[:16]
        return (
            f"ExpertPlacement({self.num_experts} experts of {self.num_layers} layers in {self.num_slots} slots of "
            f"{self.num_ranks} ranks, SHA-256 {digest})"
        )

    def __hash__(self) -> int:
        return hash((self.experts.tobytes(), self.num_experts, self.num_ranks))


def count_replicas(experts: Ints, num_experts: int) -> Ints:
    """`[L, E]`: slots that hold each expert."""
    layers = len(experts)
    keys = (experts + 1 + np.arange(layers)[:, None] * (num_experts + 1)).ravel()
    counts = np.bincount(keys, minlength=layers * (num_experts + 1)).reshape(layers, num_experts + 1)
    return counts[:, 1:].astype(np.int64)


def _read_json(path: Path) -> Mapping[Any, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {cut(str(path), 300)}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {cut(str(error))}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {type(values).__name__}.")
    return values


def _rows(layers: Any) -> Ints:
    """A file's `layers`, checked."""
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"layers must be a list with a list for every MoE layer, not {shown(layers)}.")
    for index, row in enumerate(layers):
        if not isinstance(row, list) or any(type(value) is not int for value in row):
            raise ConfigError(f"layer {index} must be a list of integers, an expert for every slot, not {shown(row)}.")
        if len(row) != len(layers[0]):
            raise ConfigError(f"layer {index} has {len(row)} slots, but layer 0 has {len(layers[0])}.")
    try:
        return np.array(layers, dtype=np.int64)
    except OverflowError:
        raise ConfigError("layers has an integer that is too large for an expert.") from None
