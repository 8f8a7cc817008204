"""Speculative decoding with any proposer: the interface of proposers, and the acceptance of drafts.

proposer    the interface of all proposers
ngram       drafts by prompt lookup
extend      the batch that writes accepted tokens to a draft model's KV cache
accept      acceptance of drafts: by match, or by rejection sampling

Draft networks are in `model_runner.drafting`; trees of drafts in `model_runner.step.draft_trees`.
"""

from model_runner.speculation.accept import Acceptance
from model_runner.speculation.ngram import NgramIndex, NgramProposer
from model_runner.speculation.proposer import Draft, Proposer, StepObserver

__all__ = ["Acceptance", "Draft", "NgramIndex", "NgramProposer", "Proposer", "StepObserver"]
