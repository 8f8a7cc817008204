"""Benchmarks of a server and of whole engines.

serve      a load on an OpenAI-compatible server
load       the load's requests: lengths, prompts, arrival times
requests   sends them when due, and times their streams
figures    throughput, and percentiles of the latencies
process    starts a server as a process of its own
fairness   how much prompts delay requests that decode
compare    `ubatch bench engine`, in these parts:
offline    offline and served, against transformers
overlap    `enable_dbo` against the same engines without it
scheduler  the scheduler's time per step
step       a decode step and a prefill of a whole engine, by kind of work
step_times the clocks of `step`
structured what grammars cost a step, and the requests beside them
structured_device the same, on a fake device
fake_device the device of `scheduler` and `structured_device`
"""
