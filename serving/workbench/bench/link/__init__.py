"""`ubatch bench link`: settings of overlap over a real link, between two servers of one deployment.

Two network namespaces stand in for two machines; TCP between them has the delay and the rate of a link. It needs root.

command   the options, and the order of things: links, then arms A B B A, then loads; the two servers, and what tells
          arms apart: their flags
network   the two hosts, the link that joins them (`tunnel.c` carries its packets), and what it really does
report    the loads, and one run of one; its times, ratios and equal answers, and their table
"""
