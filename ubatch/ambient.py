"""Ambient state: what torch and Python keep per thread, carried from the caller into its lanes.

    contextvars                     a copy per lane (a lane's changes stay its own)
    grad mode, inference mode       thread-local in torch
    autocast                        per device type: enabled, dtype, cache
    default device                  `torch.set_default_device` and `with torch.device(...)`
    intra-op threads                a new thread would start an OpenMP pool of its own size

The CUDA device and stream are the lane context's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambient"]


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> _Autocast:
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))


@dataclass(frozen=True)
class Ambient:
    """A snapshot of the calling thread; `capture` takes it, a lane runs inside `applied`."""

    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    default_device: torch.device
    threads: int

    @classmethod
    def capture(cls) -> Ambient:
        """The calling thread's state."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(_Autocast.current(kind) for kind in kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            threads=torch.get_num_threads(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the snapshot the calling thread's state for the `with` block."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for autocast in self.autocast:
                if autocast != _Autocast.current(autocast.device_type) or autocast.enabled:
                    stack.enter_context(
                        torch.autocast(
                            autocast.device_type,
                            dtype=autocast.dtype,
                            enabled=autocast.enabled,
                            cache_enabled=self.autocast_cache,
                        )
                    )
            if self.default_device != torch.get_default_device():
                stack.enter_context(torch.device(self.default_device))
            yield
