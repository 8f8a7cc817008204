"""A fake CUDA device with DeepEP's communication stream on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deep_ep_standin_events import place
from fake_cuda import FakeCuda, FakeCudaStream
from torch import Tensor


class FakeCudaWithDeepEP(FakeCuda):
    """A device with DeepEP's stream on it.

    A tensor that DeepEP has marked for a stream (`record_stream`) is not given out again before that stream is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.deep_ep = FakeCudaStream("deep_ep")
        self._marked: set[int] = set()

    def deep_ep_kernel(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensor in writes:
            self.memory_of(tensor, made_by=f"deep_ep.{name}")
        self.operation(f"deep_ep.{name}", reads, writes, self.deep_ep)
        self._marked |= {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}

    def _free(self, key: int) -> None:
        if key in self._marked:
            self._marked.remove(key)
            self._memory[key].uses = {
                stream: use for stream, use in self._memory[key].uses.items() if stream == self._memory[key].stream
            }
        super()._free(key)


@contextmanager
def deepep_device() -> Iterator[FakeCudaWithDeepEP]:
    """In force for the stand-in, lanes and collectives in the `with` block."""
    place.device = FakeCudaWithDeepEP()
    try:
        with place.device.installed():
            yield place.device
    finally:
        place.device = None
