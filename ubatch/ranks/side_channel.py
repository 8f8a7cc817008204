"""Transfers beside a group's steps: rows from rank to rank that no step waits for.

They go over a gloo group of their own, so they are never paired with what steps send, and travel in gloo's threads
while the ranks compute. Nobody has to wait for one: `Transfer.done` tells whether it has arrived. If one fails, only
the channel is lost, and the group of the steps goes on; if a rank has died, its next step tells.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from ubatch.errors import ConfigError
from ubatch.ranks.connection import Work
from ubatch.ranks.group import CommGroup
from ubatch.ranks.transfer import Transfer

Beside = Callable[[int, int], Work]
"""Puts so many bytes, sent and received, on an emulated link; over when it has delivered them."""


class SideChannel:
    """A way from every rank of a group to every other, beside the group's own. Every rank must make it, equally often.

    Transfers are launched in the same order on all ranks, but at any time: a rank that launches early waits for nobody.

    Args:
        group: the ranks. After its `reset` the channel fails; make a new one.
        beside: an emulated link to deliver over; None for the real one.

    Raises:
        GroupBroken: a rank failed since the group's last `reset()`.
        RuntimeError: the ranks did not connect within the group's time-out.
    """

    def __init__(self, group: CommGroup, beside: Beside | None = None) -> None:
        self._rank, self._size, self._beside = group.rank, group.size, beside
        self._pg = group.usable_connection().make_side_pg()

    def launch(
        self, name: str, out: Tensor, into: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Transfer[Tensor]:
        """Send bytes to every rank, and receive bytes from every rank: a transfer of `into`.

        `Transfer.wait` raises the transport's RuntimeError if it failed.

        Args:
            name: for traces and errors.
            out, into: `[N]` uint8 on the CPU; neither may be changed before it has arrived.
            sent: bytes of `out` for each rank, in the order in which they lie.
            received: bytes of `into` from each rank. What one rank sends another, the other must expect.

        Raises:
            ConfigError: there are fewer bytes than are sent or received.
            RuntimeError: the channel has failed before.
        """
        if sum(sent) > len(out) or sum(received) > len(into) or len(sent) != self._size or len(received) != self._size:
            raise ConfigError(
                f"{name!r}: {list(sent)} bytes of {len(out)} to {self._size} ranks, and {list(received)} into "
                f"{len(into)}."
            )
        into = into[: sum(received)]
        work = dist.all_to_all_single(into, out[: sum(sent)], list(received), list(sent), group=self._pg, async_op=True)
        away, back = (sum(sizes) - sizes[self._rank] for sizes in (sent, received))
        works = [work] if self._beside is None else [work, self._beside(away, back)]
        return Transfer(name, works, lambda: into, keep=(out, into), bytes_sent=away, bytes_received=back)
