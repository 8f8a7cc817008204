"""What kernels read about the requests of a step: one record each, on the device.

    slot         where the request's window and state are
    fresh        1 if its state has seen no token, so that it begins with zeros whatever the slot holds
    first        row of its first token in the step
    count        tokens in the step; 0 for padding, which reads and writes nothing
    accepted     kept tokens that were accepted, and that its state has to see first
    first_chunk  its first chunk in the list of chunks, if there is one

A captured graph reads the records at a fixed address, so a replay finds the slots of its own step there.
"""

import triton.language as tl

from ubatch.kernels.triton_jit import jit


@jit()
def read_record(
    records: tl.tensor, request: tl.tensor, KEPT: tl.constexpr, NUM_KEPT: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Slot, 1 if the state begins with zeros, row of the first input, row of the first output, number of tokens.

    With `KEPT` the tokens are the accepted ones among those that the pool keeps; their outputs have `NUM_KEPT` rows for
    every request.
    """
    record = records + request * WIDTH
    slot, fresh, accepted = tl.load(record), tl.load(record + 1), tl.load(record + 4)
    first, count = tl.load(record + 2), tl.load(record + 3)
    if KEPT:
        return slot, fresh, slot * NUM_KEPT, request * NUM_KEPT, accepted
    return slot, tl.where(accepted == 0, fresh, 0), first, first, count


@jit()
def first_chunk(records: tl.tensor, request: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Number of the request's first chunk."""
    return tl.load(records + request * WIDTH + 5)
