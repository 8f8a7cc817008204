"""Networks that draft: a head, a multi-token-prediction layer, or a small model.

target      what a draft network needs of the target's runner
network     the networks, and loading them
runner      a draft network's own keys and values, and the batches that it runs
graphs      those batches as CUDA graphs
tree        trees of drafts, grown where they are likely
sampling    chains of drafts, and drafts that are drawn, for acceptance by rejection
proposer    the proposer around a draft network
setting     a draft network that a runner makes room for
"""

from model_runner.drafting.graphs import DraftShape
from model_runner.drafting.network import DraftNetwork, load_draft
from model_runner.drafting.proposer import DraftProposer
from model_runner.drafting.setting import DraftSetting

__all__ = ["DraftNetwork", "DraftProposer", "DraftSetting", "DraftShape", "load_draft"]
