"""Ambient state: torch's and Python's per-thread state, copied from the caller's thread to its lanes; and what
cannot be copied.

    contextvars                     a copy per lane (a lane's changes stay its own)
    grad mode, inference mode       thread-local in torch
    autocast                        per device type: enabled, dtype, cache
    default device                  `torch.set_default_device` and `with torch.device(...)`
    saved-tensor hooks              the innermost pair, which is the one in effect; or that hooks are forbidden
    flags                           threads of the backward, DTensor's implicit replication, flushing of denormals, ...
    intra-op threads                a new thread would start an OpenMP pool of its own size

The lane context sets the CUDA device and stream. torch does not tell which `torch.cuda.use_mem_pool` is active, so
lanes use the default pool.

A call under a mode that cannot be copied to lanes runs unsplit in the caller's thread. There are two kinds:

    function transforms     `torch.func.grad`, `jvp`, `vmap`, `functionalize`, and forward-mode gradients: the tensors
                            of the call belong to a transform of the caller's thread, which lanes would not apply
    modes                   `FlopCounterMode`, `FakeTensorMode` and all others that see every operation of a thread;
                            `jit.trace`; blocks that switch torch functions off or change the dispatcher's keys; and
                            non-reentrant checkpoints: the recomputation must save the same tensors as the forward, so
                            both must run unsplit

torch's profilers are also bound to a thread, but change no result: `ubatch.trace.recorder` tells how to profile all
threads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_inference_mode_enabled
from torch._C import _autograd, _functorch
from torch._C import _dispatch_tls_local_exclude_set as exclude_set
from torch._C import _dispatch_tls_local_include_set as include_set
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ubatch.schedules.vote import DeclineReason

_SMALLEST_NORMAL = sys.float_info.min


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormals to zero. Found by a computation, as torch has no function to ask."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def _flags() -> tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...]:
    """How to read and set each flag that torch keeps per thread. Not every torch has all of them."""
    names = (
        ("_is_multithreading_enabled", "_set_multithreading_enabled"),
        ("_is_view_replay_enabled", "_set_view_replay_enabled"),
        ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
        ("_is_grad_layout_enforcement_enabled", "_set_grad_layout_enforcement_enabled"),
        ("_get_dtensor_allow_implicit_replication", "_set_dtensor_allow_implicit_replication"),
    )
    known = [(getattr(torch._C, get, None), getattr(torch._C, set_, None)) for get, set_ in names]
    return (
        *((get, set_) for get, set_ in known if get is not None and set_ is not None),
        (_flushes_denormals, torch.set_flush_denormal),
    )


_FLAGS = _flags()


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for a kind of device, and its dtype."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Ambient:
    """A snapshot of the calling thread's state; `capture` takes it, a lane runs inside `applied`.

    Attributes:
        autocast: kind of device -> whether it is on, and its dtype.
        saved_tensor_hooks: for tensors that are saved for the backward: pack hook and unpack hook, or None.
        hooks_forbidden: error message if setting such hooks is forbidden, else None.
    """

    grad: bool
    inference: bool
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    autocast_cache: bool
    default_device: torch.device
    saved_tensor_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks_forbidden: str | None
    flags: tuple[bool, ...]
    threads: int

    @classmethod
    def capture(cls) -> Ambient:
        """The calling thread's state."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={kind: _autocast(kind) for kind in kinds},
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            saved_tensor_hooks=_autograd._top_saved_tensors_default_hooks(False),
            hooks_forbidden=_autograd._saved_tensors_hooks_get_disabled_error_message(),
            flags=tuple([get() for get, _ in _FLAGS]),
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
            for kind, (enabled, dtype) in self.autocast.items():
                if enabled or (enabled, dtype) != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            if self.default_device != torch.get_default_device():
                stack.enter_context(torch.device(self.default_device))
            for (get, set_), flag in zip(_FLAGS, self.flags, strict=True):
                if flag != get():
                    stack.callback(set_, not flag)
                    set_(flag)
            if self.saved_tensor_hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_tensor_hooks))
            if self.hooks_forbidden is not None:
                stack.enter_context(disable_saved_tensors_hooks(self.hooks_forbidden))
            yield


def why_not_in_lanes() -> tuple[DeclineReason, str] | None:
    """Why a call from this thread must not run in lanes now; None if it may. Takes some microseconds."""
    for reason, look in ((DeclineReason.FUNCTION_TRANSFORM, function_transform), (DeclineReason.TORCH_MODE, _mode)):
        found = look()
        if found is not None:
            return reason, f"the call is inside {found}; it stays in its thread."
    return None


def function_transform() -> str | None:
    """Description of the function transform that this thread is in; None if it is in none."""
    interpreter: Any = _functorch.peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func's transform {interpreter.key().name}"
    if forward_ad._current_level >= 0:
        return "a level of forward-mode gradients (torch.autograd.forward_ad)"
    return None


def _mode() -> str | None:
    """Description of a mode that sees or changes this thread's operations; None if there is none."""
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():
            if type(mode) is not DeviceContext:  # the default device is copied to lanes
                return f"the torch function mode {type(mode).__name__}"
    if torch._C._len_torch_dispatch_stack():
        return f"the torch dispatch mode {type(_get_current_dispatch_mode()).__name__}"
    if not torch._C._is_torch_function_enabled():
        return "a block that switches torch functions off"
    if torch._C._is_tracing():
        return "torch.jit.trace"
    hooks: Any = _autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint":
        return "a checkpoint, whose recomputation must save what the forward has saved"
    included, excluded = _usual_keys(is_inference_mode_enabled())
    if include_set().raw_repr() & ~included or exclude_set().raw_repr() & ~excluded:
        return "a block that changes the keys of torch's dispatcher"
    return None


@functools.cache
def _usual_keys(inference: bool) -> tuple[int, int]:
    """Dispatch keys (bit sets) that a fresh thread includes and excludes, in inference mode or not. Autocast removes
    some of the excluded ones."""

    def look() -> tuple[int, int]:
        with torch.inference_mode(inference):
            return include_set().raw_repr(), exclude_set().raw_repr()

    with ThreadPoolExecutor(1, "ubatch-usual-keys") as fresh:
        return fresh.submit(look).result()
