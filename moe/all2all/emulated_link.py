"""`emulated_link`: another back end, delivered over an `EmulatedLink`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from moe.all2all.base import All2All, BlockCombine
from moe.all2all.layouts import Dispatched
from moe.all2all.link import EmulatedLink
from moe.all2all.registry import make_all2all
from moe.all2all.traits import All2AllTraits
from ubatch import CommGroup, ConfigError, ForwardMode, Transfer


class EmulatedLinkAll2All(All2All[Any]):
    """Launches through another back end; the link decides when it arrives.

    Args:
        link: one per rank, shared by everything that communicates.
        inner: the back end that really moves the data.

    Raises:
        ConfigError: there is no link, or `inner` is this back end or unknown.
    """

    may_signal: ClassVar[bool] = True

    def __init__(
        self,
        *,
        group: CommGroup | None,
        num_experts: int,
        link: EmulatedLink,
        inner: str = "torch_dist",
        **options: object,
    ) -> None:
        if not isinstance(link, EmulatedLink):
            raise ConfigError(f"link must be an EmulatedLink, not {type(link).__name__}.")
        if inner == "emulated_link":
            raise ConfigError("emulated_link cannot wrap itself; give `inner` the back end that moves the data.")
        self.link = link
        self.inner = make_all2all(inner, group=group, num_experts=num_experts, **options)
        self.inner.on_counts = link.signal
        self.num_experts, self.experts = self.inner.num_experts, self.inner.experts

    @property
    def traits(self) -> All2AllTraits:  # type: ignore[override]
        """The inner back end's traits, but without signals: the link cannot delay what a device signals."""
        return _without_signals(self.inner.traits)

    def traits_for(self, mode: ForwardMode, tokens: int) -> All2AllTraits:
        """See `All2All`."""
        return _without_signals(self.inner.traits_for(mode, tokens))

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        self.inner.inputs_ready(x, topk_ids, topk_weights, blocks)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        """See `All2All`. Where the host waits for counts first, those take the link's latency too."""
        transfer: Transfer[Any] = self.inner.dispatch(x, topk_ids, topk_weights)
        return self.link.carry(transfer)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[Any]]:
        """See `All2All`. One after the other on the link."""
        return [self.link.carry(each) for each in self.inner.dispatch_chunks(x, topk_ids, topk_weights, blocks)]

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[Any]]:
        return self.link.carry(self.inner.dispatch_cut(x, topk_ids, topk_weights, blocks))

    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return self.link.carry(self.inner.combine(y, handle))

    def dispatch_blocks(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Any]]:
        return self.link.carry(self.inner.dispatch_blocks(x, topk_ids, topk_weights))

    def combine_blocks(self, handle: Any) -> BlockCombine:
        return _LinkedBlocks(self.inner.combine_blocks(handle), self.link)


@dataclass(frozen=True)
class _LinkedBlocks:
    """See `BlockCombine`."""

    inner: BlockCombine
    link: EmulatedLink

    @property
    def blocks(self) -> Sequence[range]:
        return self.inner.blocks

    def send(self, y: Tensor) -> Transfer[Tensor]:
        return self.link.carry(self.inner.send(y))

    def sum_up(self, arrived: Sequence[Tensor]) -> Tensor:
        return self.inner.sum_up(arrived)


def _without_signals(traits: All2AllTraits) -> All2AllTraits:
    return replace(traits, signals=False) if traits.signals else traits
