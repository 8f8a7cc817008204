"""Draft networks: a head, a multi-token-prediction layer, or a small model.

network     the networks, loading them, and the chains that they draft, also at random for rejection sampling
runner      a draft network's own KV cache, and the batches that it runs
graphs      those batches as CUDA graphs
proposer    the proposer around a draft network, and trees of drafts, grown at the likeliest tokens
"""

from model_runner.drafting.network import DraftNetwork, load_draft
from model_runner.drafting.proposer import DraftProposer
from model_runner.settings import DraftSetting, DraftShape

__all__ = ["DraftNetwork", "DraftProposer", "DraftSetting", "DraftShape", "load_draft"]
