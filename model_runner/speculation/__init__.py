"""Speculative decoding with any proposer: the interface of proposers, and the acceptance of drafts.

proposer    the interface of all proposers, and drafts by prompt lookup
accept      acceptance of drafts: by match, or by rejection sampling

Draft networks are in `model_runner.drafting`; trees of drafts in `model_runner.step.batch`.
"""

from model_runner.speculation.accept import Acceptance
from model_runner.speculation.proposer import Draft, NgramIndex, NgramProposer, Proposer, StepObserver

__all__ = ["Acceptance", "Draft", "NgramIndex", "NgramProposer", "Proposer", "StepObserver"]
