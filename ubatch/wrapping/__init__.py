"""Wrapping a module: whether a call may overlap, the proof of it, and running it.

config        `UBatchConfig`
stand_in      an object that behaves as the module, apart from its call
eligibility   whether this rank would overlap a call, and why not
signature     which calls share a proof
proof         runs a call unsplit and in lanes, and compares
proof_table   the result of the proofs per signature
module_state  detects changes of the module and of random states
execution     runs a call in lanes, as one lane, or unsplit
statistics    a wrapper's counters
"""
