"""What is known without running: schedules, splits and votes, as data and pure functions.

schedule         lanes, chunks, active points, lead; the named ones
ring             who may run next
modes            settings of decode, prefill and verify steps
forward_context  what a step knows beside the model's arguments
split            where a batch is cut: fixed, balanced, in two chunks
split_cost       by what requests cost
split_mixed      decodes and prefills in one batch
vote             whether the ranks overlap a step
layer_program    what a lane does in MoE layers, for the simulator
simulate         a schedule on an ideal machine
search           the best schedule for given stage times
cost_table       step times by tokens, and the thresholds that follow
"""
