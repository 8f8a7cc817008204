"""Benchmarks of a server and of whole engines.

serve      a load on an OpenAI-compatible server
load       the load's requests: lengths, prompts, arrival times; throughput, and percentiles of the latencies
requests   sends them when due, and times their streams
process    starts a server as a process of its own, and looks into its processes
fairness   how much prompts delay requests that decode
compare    `ubatch bench engine`, with `enable_dbo` against none; and of its parts
offline    offline and served, against transformers
step       a decode step and a prefill of a whole engine, by kind of work
structured what grammars cost a step, and the requests beside them
fake_device a device that takes a fixed time: the scheduler's time per step, and what grammars cost there
"""
