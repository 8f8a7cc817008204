"""Lanes: threads that take turns, one per microbatch.

wakeup          how one thread wakes another
one_core        where lanes run on a GPU
baton           makes sure that exactly one lane runs
context         a lane's context, and what happens at a point; the longest wait for a transfer without a group
ambient         thread state that is copied from the caller to its lanes; what cannot be, so that the call runs unsplit
crew            the threads and the objects they share
workers         the pool of lanes: runs a step, sees hangs and failures; one lane in the caller's thread
"""
