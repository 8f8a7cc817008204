"""Speculative decoding: who drafts, how drafts lie in a batch, and which of them are accepted.

proposer    the interface of everything that drafts
tree        drafts as a tree: positions, mask, links
accept      which drafts are right: by match, or by rejection sampling
extend      the batch that refills a draft model's keys and values with accepted tokens

ngram            drafts by prompt lookup
draft_network    the networks that draft: a head, a multi-token-prediction layer, a small model
draft_runner     a draft network's own keys and values, and the batches that it runs
draft_graphs     those batches as CUDA graphs
draft_tree       trees of drafts, grown where they are likely
draft_sampling   chains of drafts, and drafts that are drawn, for acceptance by rejection
draft_proposer   the proposer around a draft network
draft_setting    a draft network that a runner makes room for
"""

from model_runner.drafting.graphs import DraftShape
from model_runner.drafting.network import DraftNetwork, load_draft
from model_runner.drafting.proposer import DraftProposer
from model_runner.drafting.setting import DraftSetting
from model_runner.speculation.accept import Acceptance
from model_runner.speculation.extend import DraftExtendBatch, draft_extend_batch
from model_runner.speculation.ngram import NgramIndex, NgramProposer
from model_runner.speculation.proposer import Draft, Proposer, StepObserver

__all__ = [
    "Acceptance",
    "Draft",
    "DraftExtendBatch",
    "DraftNetwork",
    "DraftProposer",
    "DraftSetting",
    "DraftShape",
    "NgramIndex",
    "NgramProposer",
    "Proposer",
    "StepObserver",
    "draft_extend_batch",
    "load_draft",
]
