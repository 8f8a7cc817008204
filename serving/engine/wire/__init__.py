"""What travels between processes, and who is admitted.

messages      messages between client and engines, in MessagePack
link          an engine's socket to the client; admits only clients with the cluster's secret
rendezvous    the key-value store in which processes meet
stores        the private folder of a run on one machine, and that store in it; what torch keeps in one that listens,
              signed
agreement     settings that must be equal on all nodes
secret        the cluster's secret, and the keys derived from it
"""
