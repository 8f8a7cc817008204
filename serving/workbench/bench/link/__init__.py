"""`ubatch bench link`: settings of overlap over a real link, between two servers of one deployment.

Two network namespaces stand in for two machines; TCP between them has the delay and the rate of a link. It needs root.

command      the options, and the order of things: links, then arms A B B A, then loads
network      the two hosts, and what joins them
tunnel       the link itself: `tunnel.c` carries packets from one TUN device to the other
probe        what the link really does
deployment   the two servers, and what tells arms apart: their flags
report       the loads, and one run of one; its times, ratios and equal answers, and their table
"""

from serving.workbench.bench.link.command import Options, run

__all__ = ["Options", "run"]
