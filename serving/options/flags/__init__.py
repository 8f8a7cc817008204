"""The tables of settings.

server_flags  settings of `serve`: type, default and help of each
model_flags   settings of the checkpoint and its transports
commands      settings of the other commands
fields        kinds of values
foreign       flags of vLLM and SGLang under another name, and ours
not_offered   flags of vLLM that are not offered, or not needed, and why
tables        which settings a command takes
"""
