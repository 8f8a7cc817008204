"""Wrapping a module: whether a call may overlap, the proof of it, and running it.

config        `UBatchConfig`
stand_in      everything but its call is the module's own
eligibility   what this rank would do with a call, and why
signature     what makes two calls alike
proof         a call run whole and in lanes, and compared
proof_table   what was found of every signature
module_state  what a call leaves behind in the module
execution     runs a call in lanes, as one lane, or whole
statistics    what a wrapper counts
"""
