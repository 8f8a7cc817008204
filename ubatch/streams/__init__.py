"""Streams of a device: where lanes run what, and how long memory lives.

streams          streams and events: CUDA's, or null objects
lane_streams     the two streams as one lane sees them
lifetimes        who keeps a tensor alive while a stream works on it
small_copies     small tensors to and from the device, without a wait
sm_budget        how many SMs are left to communication
graph_protocols  what is captured, and what a device must offer for it
"""
