"""Times of dispatch and combine from DeepEP's published tables: by ranks, tokens, width, top-k and the network card.

low latency       latency + bytes / bandwidth; sending and receiving occupy SMs, the time between only the link
high throughput   bytes / bandwidth; a token's bytes count once for each node that it goes to
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

from serving.workbench.planning.constants import Link
from serving.workbench.planning.kernels import interpolated
from serving.workbench.planning.shapes import ModelShape
from ubatch.errors import ConfigError

_KINDS = ("dispatch", "combine")
_BYTES_PER_VALUE = {"dispatch": 1 + 4 / 128, "combine": 2.0}  # fp8 with a float32 scale for 128 values; bf16


class Transfers:
    """The link between `ep` ranks, for one model.

    Raises:
        ConfigError: there are more ranks than in any published row, or fewer than two.
    """

    def __init__(self, model: ModelShape, link: Link, ep: int) -> None:
        largest = max(link.low_latency_us)
        if not 2 <= ep <= largest:
            raise ConfigError(f"ep must lie between 2 and {largest}, the most that was published, not {ep}.")
        self.model = model
        self.link = link
        self.ep = ep

    def extrapolated(self, *, prefill: bool) -> bool:
        """Whether `ep` is outside the range of the published table."""
        table = self.link.high_throughput_gb_per_s if prefill else self.link.low_latency_us
        return not min(table) <= self.ep <= max(table)

    def low_latency_s(self, kind: str, tokens: int, chunks: int, skew: float) -> tuple[float, float, float]:
        """Seconds of sending (on SMs), of the link and of receiving (on SMs), all chunks together."""
        link, model = self.link, self.model
        reference = link.reference_tokens * link.reference_top_k * link.reference_hidden
        share = tokens * model.top_k * model.hidden / reference
        carried_us = _at(link.low_latency_us, self.ep, kind) - link.latency_us
        carried_us *= share * skew * self._slower_card()
        total_us = chunks * link.latency_us + carried_us
        ends_us = [
            chunks * empty + (full - empty) * share for empty, full in (link.send_us[kind], link.receive_us[kind])
        ]
        return ends_us[0] * 1e-6, max(0.0, total_us - sum(ends_us)) * 1e-6, ends_us[1] * 1e-6

    def high_throughput_s(self, kind: str, tokens: int, chunks: int) -> float:
        """Seconds of a transfer, all chunks together."""
        link, model = self.link, self.model
        places = self.ep if self.ep <= link.gpus_per_node else -(-self.ep // link.gpus_per_node)
        moved = tokens * expected_destinations(model, places, chunks) * model.hidden * _BYTES_PER_VALUE[kind]
        speed = _at(link.high_throughput_gb_per_s, self.ep, kind) * 1e9
        return chunks * link.latency_us * 1e-6 + moved / speed * self._slower_card()

    def _slower_card(self) -> float:
        """Factor on the measured time because of another network card; 1 inside a node."""
        inside = self.ep <= self.link.gpus_per_node
        return 1.0 if inside else self.link.reference_nic_gb_per_s / self.link.nic_gb_per_s


def _at(table: Mapping[int, tuple[float, float]], ep: int, kind: str) -> float:
    column = _KINDS.index(kind)
    return interpolated({ranks: row[column] for ranks, row in table.items()}, ep)


def expected_destinations(model: ModelShape, places: int, chunks: int = 1) -> float:
    """Expected transfers of one token: it travels once to each place (rank or node) that holds one of its experts.

    With chunks, it travels once to each chunk of a place that holds one of its experts, so there are more transfers
    (x1.48 for 2 places, 32 experts, top 4; x1.06 for 32 places, 256 experts, top 8). Each place has an equal share of
    the experts, and each chunk is assumed to hold an even mix of its place's groups.
    """
    here = model.experts / places  # experts of one place
    spanned = max(1, round(model.groups / places))  # groups that a place's experts belong to
    pool = model.experts * model.top_groups // model.groups
    missed = 0.0
    for chosen in range(min(spanned, model.top_groups) + 1):
        ways = comb(spanned, chosen) * comb(model.groups - spanned, model.top_groups - chosen)
        eligible = here / chunks * chosen / spanned
        missed += ways / comb(model.groups, model.top_groups) * _none_of(pool, eligible, model.top_k)
    return places * chunks * (1.0 - missed)


def _none_of(pool: int, some: float, drawn: int) -> float:
    """Probability that `drawn` items from `pool` include none of `some` items; `some` need not be whole."""
    probability = 1.0
    for taken in range(drawn):
        probability *= max(0.0, pool - some - taken) / (pool - taken)
    return probability
