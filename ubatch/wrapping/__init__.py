"""Wrapping a module: whether a call may overlap, the proof of it, and running it.

config        `UBatchConfig`
stand_in      an object that behaves as the module, apart from its call
eligibility   whether this rank would overlap a call, and why not
signature     which calls share a proof
proof         runs a call unsplit and in lanes, and compares
proof_table   the result of the proofs per signature
guard         around a call in lanes: what changed unlike in its proof, and putting it back
state         what a call may change of the module and of its arguments; random_state the same of random generators
stores        what the code of a module may leave on shared objects between two points
execution     runs a call in lanes, as one lane, or unsplit
statistics    a wrapper's counters
"""
