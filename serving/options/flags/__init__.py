"""The tables of settings.

server_flags  settings of `serve`: type, default and help of each
fields        kinds of values
foreign       flags of vLLM and SGLang under another name, and ours; what is not offered, or not needed, and why (YAML)
tables        which settings a command takes; those of the checkpoint, and of the commands other than `serve`
"""
