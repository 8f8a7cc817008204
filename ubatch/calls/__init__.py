"""A call: its arguments cut into lanes, and the lanes' outputs put together.

call_leaves  a call as named tensors and plain values
containers   what arguments and outputs are nested in
arguments    cuts the arguments
call_plan    the call, cut
caches       cuts and merges caches that a model changes in place
copies       of the arguments, for a proof
outputs      merges outputs that nobody proved
merging      merges outputs by the rule that a proof has found
closeness    whether two results are equal but for rounding
"""
