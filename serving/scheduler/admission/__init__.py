"""Which requests are admitted, and when.

waiting  the queue of waiting requests
sharing  requests with a common prefix compute it once
budget   KV kept free for tokens of running requests; which one is retracted
checks   refuses requests that can never be served
"""
