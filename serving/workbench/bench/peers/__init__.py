"""`ubatch bench peers`: this engine against vLLM and transformers on a CPU, on the same checkpoint and prompts.

Every engine runs in processes of its own: vLLM and transformers by the interpreters that the user names, as they are no
dependencies. All are loaded, one works at a time, A B B A.

command   the options, and the order of things; servers, ours and vLLM's; times, ratios and equal tokens of a load
engine    the program that runs in an engine's interpreter: it loads a model, and generates when told
process   starts that program and talks to it; ends an engine with all its processes
"""
