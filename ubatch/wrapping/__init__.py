"""Wrapping a module: whether a call may overlap, the proof of it, and running it. `effects`: what a call may change.

config        `UBatchConfig`
stand_in      an object that behaves as the module, apart from its call
eligibility   whether this rank would overlap a call, and why not
proof         runs a call unsplit and in lanes, and compares
proof_table   which calls share a proof, and the results of the proofs
guard         around a call in lanes: what changed unlike in its proof, and putting it back
step          what this rank would do with a call; and a step that is decided: what both doors to the lanes hand in
execution     runs a step in lanes, as one lane, or unsplit
statistics    a wrapper's counters
"""

from ubatch.wrapping.step import DecidedStep

__all__ = ["DecidedStep"]
