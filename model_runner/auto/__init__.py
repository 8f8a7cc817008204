"""When to overlap, found out while steps run (`--dbo-auto`), and what splits by cost are reckoned with.

step_cost     what a token and an attended pair cost in a model
dbo_model     how long a step takes, plain and overlapped, from those that were seen
dbo_policy    whether the next step overlaps, or is a trial
dbo_auto      both, for a runner: settings of each step, and what the ranks tell each other
"""
