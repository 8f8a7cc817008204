"""torch's per-thread modes that cannot be copied to lanes: a call under one runs unsplit in the caller's thread.

`ubatch.lanes.ambient` copies the other state. There are two kinds that cannot be copied:

    function transforms     `torch.func.grad`, `jvp`, `vmap`, `functionalize`, and forward-mode gradients: the tensors
                            of the call belong to a transform of the caller's thread, which lanes would not apply
    modes                   `FlopCounterMode`, `FakeTensorMode` and all others that see every operation of a thread;
                            `jit.trace`; blocks that switch torch functions off or change the dispatcher's keys; and
                            non-reentrant checkpoints: the recomputation must save the same tensors as the forward, so
                            both must run unsplit

torch's profilers are also bound to a thread, but change no result: `ubatch.trace.ranges` tells how to profile all
threads.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import is_inference_mode_enabled
from torch._C import _autograd, _functorch
from torch._C import _dispatch_tls_local_exclude_set as exclude_set
from torch._C import _dispatch_tls_local_include_set as include_set
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ubatch.schedules.vote import DeclineReason


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
