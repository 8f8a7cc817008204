"""The shape of a draft network's drafts: chains or trees, and their size."""

from __future__ import annotations

from dataclasses import dataclass

from ubatch import ConfigError

__all__ = ["DraftShape", "most_nodes"]


def most_nodes(num_steps: int, topk: int) -> int:
    """Number of candidate nodes of a tree with `num_steps` levels."""
    return topk + (num_steps - 1) * topk * topk


@dataclass(frozen=True)
class DraftShape:
    """The shape of a proposer's drafts.

    Attributes:
        num_steps: drafts of a chain, or levels of a tree.
        topk: nodes of a level; 1 for chains.
        num_drafts: drafts of a request in a verify step.
        sampled: drafts of sampled requests are drawn at random, for rejection sampling; chains only.

    Raises:
        ConfigError: at construction, if the numbers contradict each other.
    """

    num_steps: int
    topk: int
    num_drafts: int
    sampled: bool

    def __post_init__(self) -> None:
        num_steps, topk = self.num_steps, self.topk
        for name in ("num_steps", "topk", "num_drafts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if topk == 1 and self.num_drafts != num_steps:
            raise ConfigError(
                f"num_drafts is {self.num_drafts}, num_steps {num_steps}: a chain has one draft per step. Make them "
                "equal, or choose topk above 1 for a tree."
            )
        if topk > 1 and self.sampled:
            raise ConfigError(f"drafts that are drawn are chains; topk is {topk}. Use 1, or drafts that are not drawn.")
        if self.num_drafts > most_nodes(num_steps, topk):
            raise ConfigError(
                f"num_drafts is {self.num_drafts}; a tree of num_steps {num_steps} and topk {topk} has "
                f"{most_nodes(num_steps, topk)} nodes to choose from."
            )

    @property
    def num_places(self) -> int:
        """Positions after a request's last known token that need KV slots while drafts are made or verified."""
        return max(self.num_drafts, (self.num_steps - 1) * self.topk if self.topk > 1 else 0)
