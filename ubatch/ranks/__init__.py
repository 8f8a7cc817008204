"""Several ranks: their transfers, their votes, and how they notice a failed peer.

group                 ranks that share collectives, vote, and restart after a failure
connection            the process groups of a group, between two resets
transports            torch's groups of a connection, kept until nothing can wait for them
peer_watch            a thread that watches for failed peers
long_calls            calls that may take longer than `timeout_s`
near                  small messages between ranks of one machine
waits                 when transfers were launched and arrived, and what is done while a step waits for one
transfer              communication that was launched and can be waited for
collectives           collectives that hand on while the data travels, and their gradients
side_channel          transfers that no step waits for
ways                  how rows travel over gloo: by their own sockets, or in one piece, or in two
launch_checks         checks before a collective is launched
launch_order          checks that all ranks launch in the same order (`UBATCH_CHECK_ORDER=1`)
host_copy             copies small tensors to the host without waiting for the device's queue
intercept             turns torch's own waits into points
fsdp                  lanes with `fully_shard`, which gathers and frees weights
"""

from ubatch.ranks.collectives import Carry
from ubatch.ranks.connection import Connection
from ubatch.ranks.group import check_group
from ubatch.ranks.host_copy import CopiedWork
from ubatch.ranks.launch_checks import check_launch
from ubatch.ranks.long_calls import holding_gil, taking_long
from ubatch.ranks.near import put_sockets_in
from ubatch.ranks.side_channel import SideChannel
from ubatch.ranks.transfer import Queued
from ubatch.ranks.waits import Arrival, in_gaps, record_transfers

__all__ = [
    "Arrival",
    "Carry",
    "Connection",
    "CopiedWork",
    "Queued",
    "SideChannel",
    "check_group",
    "check_launch",
    "holding_gil",
    "in_gaps",
    "put_sockets_in",
    "record_transfers",
    "taking_long",
]
