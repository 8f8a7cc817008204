"""Several ranks: what they exchange, agree on, and see when one fails.

group                 ranks that share collectives, vote, and start again after a failure
connection            what joins them between two resets
peer_watch            looks out for failed peers where no thread waits
long_calls            calls that take longer than `timeout_s` and do not hang
transfer              communication that was launched and can be waited for
collectives           collectives that hand on while the data travels
collective_gradients  their gradients
launch_checks         what is refused before a launch
launch_order          whether all ranks launch alike (`UBATCH_CHECK_ORDER=1`)
host_copy             a few numbers for the host, without waiting for the device's queue
intercept             torch's own waits become points
fsdp                  weights that torch gathers and frees
"""
