"""Which requests are admitted, and when.

prefills    the prompts of a step: the split one, and new ones, which are admitted
waiting     the queue of waiting requests
sharing     requests with a common prefix compute it once
retraction  KV kept free for tokens of running requests; which one is retracted if it was too little
checks      refuses requests that can never be served
"""
