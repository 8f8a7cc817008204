"""`ubatch bench eplb`: what balanced experts gain and cost.

skewed     models with skewed routers: experts by their ids, planned, and perfectly balanced
gain       what balance gains, with DBO and without; what counting the load costs; the simulator against skewed steps
moving     what steps feel of experts that move, and whether the tokens are the same
shift      how soon experts are balanced again
command    the options, and the order of things
"""
