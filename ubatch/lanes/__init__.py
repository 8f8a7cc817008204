"""Lanes: the threads that take turns, and what each one is.

wakeup       how one thread wakes another
baton        exactly one lane runs
context      a lane's context, and what happens at a point
hooks        the receive hook that a lane has pending
ambient      what a lane takes over from the caller's thread
torch_modes  what no lane can take over
crew         the threads, and what they share
workers      the pool of lanes: runs a step, sees hangs and failures
single_lane  one lane in the caller's thread
handover     what a stage leaves for a later one
time_limit   how long a transfer of no group may take
"""
