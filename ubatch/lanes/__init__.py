"""Lanes: threads that take turns, one per microbatch.

wakeup          how one thread wakes another
one_core        where lanes run on a GPU
baton           makes sure that exactly one lane runs
context         a lane's context, and what happens at a point
ambient         thread state that is copied from the caller to its lanes
torch_modes     thread state that cannot be copied, so that the call runs unsplit
crew            the threads and the objects they share
workers         the pool of lanes: runs a step, sees hangs and failures
single_lane     one lane in the caller's thread
transfer_limit  the longest wait for a transfer without a group
"""
