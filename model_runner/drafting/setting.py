"""A draft network that a runner makes room for: it is loaded with the model, before the KV cache is sized, and has its
own cache and graphs from when the model has them. So what it takes of a GPU's memory is measured with the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attention import CacheSpec
from model_runner.drafting.graphs import DraftShape
from model_runner.drafting.network import DraftNetwork, load_draft
from model_runner.drafting.proposer import DraftProposer
from model_runner.drafting.runner import draft_cache_spec
from model_runner.drafting.target import TargetRunner
from ubatch import ConfigError

__all__ = ["DraftSetting", "LoadedDraft"]


@dataclass(frozen=True)
class DraftSetting:
    """Which network drafts for a runner, and what.

    Attributes:
        algorithm, path: see `load_draft`.
        shape: of the drafts.
    """

    algorithm: str
    path: Path | None
    shape: DraftShape

    def load(self, runner: TargetRunner) -> LoadedDraft:
        """The network, for a runner whose model is loaded; see `load_draft`, also for errors."""
        return LoadedDraft(load_draft(self.algorithm, self.path, runner), self.shape)


@dataclass(frozen=True)
class LoadedDraft:
    """The network, and what it drafts."""

    network: DraftNetwork
    shape: DraftShape

    def bytes_per_block(self, spec: CacheSpec) -> int:
        """What it keeps beside a block of the model's KV cache."""
        return draft_cache_spec(self.network, spec).bytes_per_block

    def proposer(self, runner: TargetRunner) -> DraftProposer:
        """A proposer with a cache of as many blocks as the runner has now.

        Raises:
            ConfigError: the model cannot verify the trees that it is to draft, or see `DraftProposer`.
        """
        shape = self.shape
        if shape.topk > 1 and not runner.attention.takes_trees:
            raise ConfigError(
                f"attention back end {runner.attention.decode_name!r} has no tree masks, so it cannot verify drafts of "
                f"topk {shape.topk}. Choose another decode attention back end, or topk 1."
            )
        return DraftProposer(
            runner,
            self.network,
            num_steps=shape.num_steps,
            topk=shape.topk,
            num_draft_tokens=shape.num_drafts,
            sampled=shape.sampled,
        )
