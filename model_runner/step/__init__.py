"""One step: the requests' shares, their batch, the vote of all ranks, and the streams on the device.

request           a request during generation, its share of one step, its row of the block table and its blocks
step              what travels from the scheduler to the lanes, and who fills it
batch             shares, flattened into one batch; the drafts in it: chains and trees
graph_sizes       which steps are captured, and which graph a step is padded to
dp                the vote with the other ranks, this rank's lanes, their attention plans and forward contexts
streams           the streams of a step, and their order
future_map        tokens that the host does not know yet
logprobs          log-probabilities of tokens
"""
