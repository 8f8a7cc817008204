"""What measures; nothing that serves imports it.

bench     `ubatch bench`: one module or folder a benchmark
gpu       `make test-gpu`, `make bench-gpu`: the same on a GPU, with as few packages as may be
planning  `ubatch simulate`: machines that are not here
tracing   `ubatch trace`: timelines, and what they say
tuning    `ubatch tune`: when overlap pays
"""
