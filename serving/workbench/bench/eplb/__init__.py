"""`ubatch bench eplb`: what balanced experts gain and cost.

skewed     models with skewed routers: experts by their ids, planned, and perfectly balanced
gain       what balance gains, with DBO and without
same       whether the tokens are the same
predict    the simulator against skewed steps
counting   what counting the load costs
moving     what steps feel of experts that move
shift      how soon experts are balanced again
command    the options, and the order of things
"""

from serving.workbench.bench.eplb.command import Options, run

__all__ = ["Options", "run"]
