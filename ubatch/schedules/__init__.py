"""Schedules, splits and votes, as data and pure functions: no device and no threads are needed.

schedule         lanes, chunks, active points, lead; the named schedules
ring             which lane runs next
modes            settings per mode: decode, prefill and verify steps
forward_context  data of a step beyond the model's arguments
split            where a batch is cut: fixed, balanced, in two chunks
split_cost       where a batch is cut, by the cost of its requests
split_mixed      where a batch of decodes and prefills is cut
vote             the ranks' decision whether to overlap a step
layer_program    the operations of a lane in MoE layers, for the simulator
simulate         runs a schedule on an ideal machine
search           the best schedule for given stage times
"""
