"""Makes Triton's interpreter faster and changes nothing that it computes (triton 3.6 to 3.9).

Most of its time goes into describing types that it has described before, and into checks for integer overflow whose
result reaches an assertion that is off.
"""

import dataclasses

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Patched:
    def restore(self):
        pass


def install() -> None:
    """Patch Triton's interpreter in this process, once."""
    if getattr(interpreter, "_moe_fast", False):
        return
    interpreter._moe_fast = True
    _patch_languages_once()
    _know_the_builtins()
    _compute_no_unread_overflow()
    _describe_types_once()
    _broadcast_only_what_differs()


def _patch_languages_once() -> None:
    """Nested @triton.jit calls patch triton.language anew on every call; patch it once per launch and module."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    seen = None  # modules patched in the launch that runs; None between launches

    def patch_once(fn):
        key = id(fn.__globals__)
        if seen is not None:
            if key in seen:
                return _Patched()
            seen.add(key)
        return patch(fn)

    def launch_once(self, *args, **kwargs):
        nonlocal seen
        outer, seen = seen, set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            seen = outer

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once


def _know_the_builtins() -> None:
    """Look through the language's modules and classes for what a launch patches now, not at each launch."""
    is_builtin, packages = tl.core.is_builtin, (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    names = {package: [name for name in dir(package) if is_builtin(getattr(package, name))] for package in packages}
    look = interpreter._patch_builtin

    def patch_builtin(package, builder, scope):
        if package not in names:
            return look(package, builder, scope)
        for name in names[package]:
            # a launch within a launch finds them patched
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _compute_no_unread_overflow() -> None:
    builder = interpreter.interpreter_builder
    # its device_assert returns at once unless debug is on
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _describe_types_once() -> None:
    """Types with the same name have the same NumPy type, shape and number of elements."""
    block, tensor, np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    np_dtypes, blocks, tensors = {}, {}, {}
    equal = tl.dtype.__eq__

    def get_np_dtype(dtype):
        found = np_dtypes.get(dtype.name)
        if found is None:
            found = np_dtypes[dtype.name] = np_dtype(dtype)
        return found

    def init_block(self, element_ty, shape):
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        known = blocks.get(key)
        if known is None:
            block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.element_ty = element_ty
            vars(self).update(known)

    def init_tensor(self, handle, type):
        known = tensors.get(type.name)
        if known is None:
            tensor(self, handle, type)
            tensors[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(known)

    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _broadcast_only_what_differs() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
