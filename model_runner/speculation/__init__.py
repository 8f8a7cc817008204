"""Speculative decoding with any proposer: who drafts, and which drafts are accepted.

proposer    the interface of everything that drafts
ngram       drafts by prompt lookup
extend      the batch that refills a draft model's keys and values with accepted tokens
accept      which drafts are right: by match, or by rejection sampling

Networks that draft are in `model_runner.drafting`; drafts as a tree in `model_runner.step.draft_trees`.
"""

from model_runner.speculation.accept import Acceptance
from model_runner.speculation.extend import DraftExtendBatch, draft_extend_batch
from model_runner.speculation.ngram import NgramIndex, NgramProposer
from model_runner.speculation.proposer import Draft, Proposer, StepObserver

__all__ = [
    "Acceptance",
    "Draft",
    "DraftExtendBatch",
    "NgramIndex",
    "NgramProposer",
    "Proposer",
    "StepObserver",
    "draft_extend_batch",
]
