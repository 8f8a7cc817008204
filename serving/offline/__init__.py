"""What offline use is made of: vLLM's names over this project's engines. `serving.llm` and `serving.async_llm` use it.

sampling_params  what a caller asks for, with vLLM's fields and defaults
outputs          what a caller gets
prompts          the forms of a prompt; `conversations` writes messages as text
jobs             a prompt that runs, from the engine's steps to an output
engine_args      the options, typed; `options` turns them into settings
front            from prompts and parameters to jobs; `opening` makes it, before engines start
metrics          the engines' statistics as vLLM's metrics
not_offered      names and options of vLLM that are not here, and why
"""

from serving.offline.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
