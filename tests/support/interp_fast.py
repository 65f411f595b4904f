"""Make Triton's interpreter faster without changing what it computes (triton 3.6 to 3.9).

It spends most of its time on describing types again, finding out which type two types compute in,
nested wrappers, and checks for integer overflow whose result only reaches a disabled assertion.
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
    _call_builtins_directly()
    _compute_no_unread_overflow()
    _describe_types_once()
    _translate_types_once()
    _unwrap_only_what_is_wrapped()
    _know_what_two_types_compute_in()
    _make_constants_once()
    _broadcast_only_what_differs()


def _patch_languages_once() -> None:
    """Nested @triton.jit calls patch triton.language again on every call; patch it once per launch
    and module.
    """
    launch = interpreter.GridExecutor.__call__
    patch = interpreter._patch_lang
    seen = None  # modules patched in the current launch; None between launches

    def patch_once(fn):
        key = id(fn.__globals__)
        if seen is not None:
            if key in seen:
                return _Patched()
            seen.add(key)
        return patch(fn)

    def launch_once(self, *args, **kwargs):
        nonlocal seen
        outer = seen
        seen = set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            seen = outer

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once


def _know_the_builtins() -> None:
    """Look through the language's modules and classes once for what a launch patches, instead of at
    each launch.
    """
    is_builtin = tl.core.is_builtin
    packages = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    names = {
        package: [name for name in dir(package) if is_builtin(getattr(package, name))]
        for package in packages
    }
    look = interpreter._patch_builtin

    def patch_builtin(package, builder, scope):
        if package not in names:
            return look(package, builder, scope)
        for name in names[package]:
            # nested launches find them patched
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)
        return None

    interpreter._patch_builtin = patch_builtin


def _call_builtins_directly() -> None:
    """A launch wraps every builtin again, around a wrapper that only checks for `_semantic`."""
    semantic = interpreter.interpreter_semantic
    wrapper = tl.core.builtin(lambda: None).__code__
    patch = interpreter._patch_attr
    made = {}

    def patch_attr(obj, name, member, builder, scope):
        if builder is not interpreter.interpreter_builder:
            return patch(obj, name, member, builder, scope)
        if member not in made:
            inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

            def call(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)

            made[member] = call
        scope.set_attr(obj, name, made[member])
        return None

    interpreter._patch_attr = patch_attr


def _compute_no_unread_overflow() -> None:
    builder = interpreter.interpreter_builder
    # its device_assert returns immediately unless debug is on
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _describe_types_once() -> None:
    """Types with the same name have the same NumPy type, shape and number of elements."""
    block = tl.block_type.__init__
    tensor = tl.tensor.__init__
    np_dtype = interpreter._get_np_dtype
    other = tl.block_type.with_element_ty
    equal = tl.dtype.__eq__
    np_dtypes = {}
    blocks = {}
    tensors = {}
    others = {}
    widths = {}

    def get_np_dtype(dtype):
        found = np_dtypes.get(dtype.name)
        if found is None:
            found = np_dtypes[dtype.name] = np_dtype(dtype)
        return found

    def init_block(self, element_ty, shape):
        shape = shape.values if type(shape) is tl.tuple else shape
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element_ty.name, sizes
        known = blocks.get(key)
        if known is None:
            block(self, element_ty, list(shape))
            self.sizes = sizes  # a Python tuple, which compares faster than Triton's
            blocks[key] = {
                name: value for name, value in vars(self).items() if name != "element_ty"
            }
        else:
            self.element_ty = element_ty
            vars(self).update(known)

    def init_tensor(self, handle, type):
        known = tensors.get(type.name)
        if known is None:
            tensor(self, handle, type)
            tensors[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
        else:
            self.handle = handle
            self.type = type
            self.dtype = type.scalar
            vars(self).update(known)

    def with_element_ty(self, scalar_ty):
        key = self.name, scalar_ty.name
        if key not in others:
            others[key] = other(self, scalar_ty)
        return others[key]

    def is_size_valid(array, dtype):
        width = widths.get(dtype.name)
        if width is None:
            # a pointer's array may have any size; an element smaller than a byte takes a byte
            width = widths[dtype.name] = (
                1 << 30 if dtype.is_ptr() else max(8, dtype.primitive_bitwidth) / 8
            )
        return array.itemsize <= width

    interpreter._get_np_dtype = get_np_dtype
    interpreter._validate_np_data_size = is_size_valid
    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
    tl.block_type.with_element_ty = with_element_ty
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    integers = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
    tl.dtype.is_int = lambda self: self.name in integers


def _translate_types_once() -> None:
    """The interpreter's builder uses Triton's types as IR types: one for each name."""

    def once(to_ir):
        known = {}

        def translate(self, builder):
            if builder is not interpreter.interpreter_builder:
                return to_ir(self, builder)
            if self.name not in known:
                known[self.name] = to_ir(self, builder)
            return known[self.name]

        return translate

    for kind in (tl.dtype, tl.block_type, tl.pointer_type):
        kind.to_ir = once(kind.to_ir)


def _unwrap_only_what_is_wrapped() -> None:
    unwrap = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(o):
        return o if type(o) in plain else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr


def _know_what_two_types_compute_in() -> None:
    """The result depends only on the types' names; if both types are the same and not narrow, it is
    that type.
    """
    compute = TritonSemantic.computation_type_impl
    check = TritonSemantic.binary_op_type_checking_impl
    answers = {}
    wide = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES + ["fp32", "fp64"])

    def computation_type_impl(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in answers:
            answers[key] = compute(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return answers[key]

    def binary_op_type_checking_impl(self, lhs, rhs, *args, **kwargs):
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in wide:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    TritonSemantic.computation_type_impl = computation_type_impl
    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl


def _make_constants_once() -> None:
    """No operation modifies its operands; float zeros are excluded, since 0.0 equals -0.0."""
    constant = TritonSemantic.scalar_constant
    made = {}

    def scalar_constant(self, value, dtype):
        kind = type(value)
        if self is not interpreter.interpreter_semantic or (
            kind is not int and (kind is not float or value == 0)
        ):
            return constant(self, value, dtype)
        key = kind, value, dtype.name
        if key not in made:
            if len(made) > 10_000:
                made.clear()
            made[key] = constant(self, value, dtype)
        return made[key]

    TritonSemantic.scalar_constant = scalar_constant


def _broadcast_only_what_differs() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        left = lhs.type
        right = rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block():
            if right.is_block() and left.sizes == right.sizes:
                return lhs, rhs
        elif not right.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
