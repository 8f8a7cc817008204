"""A draft network for which a runner reserves memory: it is loaded with the model, before the KV cache is sized, and
gets its cache and graphs together with the model's. So its GPU memory is measured with the rest.
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

__all__ = ["DraftSetting", "LoadedDraft"]


@dataclass(frozen=True)
class DraftSetting:
    """The draft network of a runner, and the shape of its drafts.

    Attributes:
        algorithm, path: see `load_draft`.
        shape: shape of the drafts.
    """

    algorithm: str
    path: Path | None
    shape: DraftShape

    def load(self, runner: TargetRunner) -> LoadedDraft:
        """Load the network, for a runner whose model is loaded; errors as of `load_draft`."""
        return LoadedDraft(load_draft(self.algorithm, self.path, runner), self.shape)


@dataclass(frozen=True)
class LoadedDraft:
    """A loaded draft network, and the shape of its drafts."""

    network: DraftNetwork
    shape: DraftShape

    def bytes_per_block(self, spec: CacheSpec) -> int:
        """Bytes of the draft KV cache per block of the model's KV cache."""
        return draft_cache_spec(self.network, spec).bytes_per_block

    def proposer(self, runner: TargetRunner) -> DraftProposer:
        """A proposer whose cache has as many blocks as the runner's cache has now; errors as of `DraftProposer`."""
        return DraftProposer(runner, self.network, self.shape)
