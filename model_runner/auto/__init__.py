"""`--dbo-auto` learns from running steps when to overlap; the costs that a split by cost needs.

step_cost     cost of a token and of an attended pair in a model
dbo_model     estimates the time of a step, serial and overlapped, from measured steps
dbo_policy    decides whether the next step overlaps, or is a trial
dbo_auto      both, for a runner: settings of each step, and the exchange of times between ranks
"""
