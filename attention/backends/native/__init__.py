"""Kernels in C on a CPU, compiled where they run, that read the pages in place.

decodes    requests with one new token, as the kernels read them
mha        `native`: over keys and values
pages.c    attention of one query per request over pages; decode.c follows it
"""
