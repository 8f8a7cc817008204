"""What offline use is made of: vLLM's names over this project's engines. `serving.llm` and `serving.llm_engine` use it.

sampling_params  what a caller asks for, with vLLM's fields and defaults
outputs          what a caller gets; a prompt that runs, from the engine's steps to an output; metrics
prompts          the forms of a prompt, and conversations as text
engine_args      the options, typed
front            from prompts and parameters to jobs
opening          from options to settings and a front, before engines start
not_offered      names and methods of vLLM that are not here, and why; fields that are refused
"""

from serving.offline.outputs import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
