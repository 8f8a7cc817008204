"""One step: from requests to a batch, agreed on by all ranks, and what it needs on the device.

request           a request while it is generated, and its share of one step
request_memory    its row of the block table, and its blocks
input_batch       shares, flattened into one batch
draft_trees       trees of drafts in a batch
verify            how many drafts a batch has
graph_sizes       which steps are captured, and which graph a step is padded to
dp                the vote with the other ranks, and this rank's lanes
context           what every lane of a step knows
streams           what runs where, and who waits for whom
future_map        tokens that the host does not know yet
logprobs          how likely tokens were
"""
