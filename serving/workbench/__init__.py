"""Tools that measure; no code that serves imports them.

arms      steps in several arms, measured: what several of these build on
bench     `ubatch bench`: one module or folder per benchmark
gpu       `make test-gpu`, `make bench-gpu`: tests and benchmarks on a GPU, with as few packages as possible
planning  `ubatch simulate`: predictions for machines that are not at hand
tracing   `ubatch trace`: timelines, and their diagnosis
tuning    `ubatch tune`: when overlap pays
"""
