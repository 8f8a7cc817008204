"""`--enable-dbo` learns from running steps when to overlap; what a split by cost and `--dtype auto` need.

step_cost      cost of a token and of an attended pair in a model
step_stages    where a step's time went, over all ranks, and how long the simulator expects it to be under a schedule
dbo_policy     what is known of steps of one kind and size, and whether the next one overlaps
step_settings  all of these for a runner: what it votes with, and what it times
cpu_dtype      the faster dtype on this CPU
"""

from model_runner.auto.step_settings import Proposal

__all__ = ["Proposal"]
