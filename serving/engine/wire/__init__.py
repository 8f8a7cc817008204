"""What travels between processes, and who is admitted.

messages      messages between client and engines, in MessagePack
link          an engine's socket to the client
rendezvous    the key-value store in which processes meet
stores        that store where all processes run on one machine; what torch keeps in one that listens, signed
agreement     settings that must be equal on all nodes
secret        the cluster's secret, and the keys derived from it
gate          admits only clients with that secret
"""
