"""A call: its arguments split into lanes, and the lanes' outputs merged.

containers   nested arguments and outputs, taken apart and rebuilt
arguments    decides where to split each argument
call_plan    a call as named leaves; how it is split, and copied for a proof
caches       splits and merges caches that a model changes in place
merging      merges outputs by rules, and learns the rules in a proof
outputs      the rule of a call that was not proved
closeness    whether two results are equal except for rounding
"""

from ubatch.calls.call_plan import Call

__all__ = ["Call"]
