"""The benchmarks of `ubatch bench`.

statistics, options  shared by all: how to measure, print and write
provenance           from what, how and when a file of results was measured; `ubatch bench results`
step_setting         a model, a batch and an emulated link, for steps under any schedule
runtime              steps and pieces of them: hand-offs, lanes, experts, attention, overlap, schedules, drafts
server               whole engines and servers, under load and under attack
link                 two servers of one deployment, joined by a link with delay and rate
faults               servers whose engines are killed, hang and fail while requests run
peers                whole engines against vLLM's and transformers', in environments of their own
generate, corpus     whole generations against transformers', and held-out text
"""
