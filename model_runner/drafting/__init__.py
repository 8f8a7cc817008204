"""Draft networks: a head, a multi-token-prediction layer, or a small model.

target      the part of the target's runner that a draft network needs
network     the networks, and loading them
runner      a draft network's own KV cache, and the batches that it runs
graphs      those batches as CUDA graphs
tree        trees of drafts, grown at the likeliest tokens
sampling    chains of drafts, and random drafts for rejection sampling
proposer    the proposer around a draft network
setting     a draft network for which a runner reserves memory
"""

from model_runner.drafting.graphs import DraftShape
from model_runner.drafting.network import DraftNetwork, load_draft
from model_runner.drafting.proposer import DraftProposer
from model_runner.drafting.setting import DraftSetting

__all__ = ["DraftNetwork", "DraftProposer", "DraftSetting", "DraftShape", "load_draft"]
