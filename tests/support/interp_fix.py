"""Make Triton's NumPy interpreter correct for bf16 and fp8 (triton 3.6 to 3.9).

The interpreter stores bf16 as raw uint16, so tl.dot multiplies and binary operators add and compare
those integers, and casts truncate (bf16) or lose the mantissa's carry (fp8). This fixes dots, casts
and comparisons, and raises on bf16 arithmetic, reductions and atomics: kernels must upcast to
float32 right after the load, on the GPU as well.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from moe_runtime import backends

NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
NARROW_NAMES = frozenset(dtype.name for dtype in NARROW)  # hashing a Triton type is slow
COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
EXACT = (*COMPARISONS, np.maximum, np.minimum, np.fmax, np.fmin)


def decode(handle) -> np.ndarray:
    """Return a handle's values, with bf16 and fp8 as float32."""
    dtype = NARROW.get(handle.dtype.scalar)
    if dtype is None:
        return handle.data
    bits = np.ascontiguousarray(handle.data).view(np.int16 if dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(dtype).float().numpy().reshape(handle.data.shape)


def encode(values: np.ndarray, scalar) -> np.ndarray:
    """Return `values` as the interpreter stores the Triton type `scalar`, rounded to nearest
    even.
    """
    dtype = NARROW.get(scalar)
    if dtype is None:
        return values.astype(interpreter._get_np_dtype(scalar))
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(dtype)
    if dtype.itemsize == 2:
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))
    return rounded.view(torch.uint8).numpy().reshape(np.shape(values))


def install() -> None:
    """Patch Triton's interpreter in this process, once."""
    if getattr(InterpreterBuilder, "_moe_fixed", False):
        return
    InterpreterBuilder._moe_fixed = True
    backends.interpreter_knows_bfloat16 = True
    _fix_casts()
    _fix_operators()
    _fix_reductions()
    _fix_index()


def _is_narrow(*handles) -> bool:
    return not NARROW_NAMES.isdisjoint([handle.dtype.scalar.name for handle in handles])


def _refuse(what: str):
    raise TypeError(f"{what} on a bf16/fp8 tensor: upcast with .to(tl.float32) first")


def _fix_casts() -> None:
    cast = InterpreterBuilder.cast_impl
    fp_to_fp = InterpreterBuilder.create_fp_to_fp

    def fixed(original):
        def convert(self, src, dst, *mode):
            if _is_narrow(src) or dst.scalar in NARROW:
                return TensorHandle(encode(decode(src), dst.scalar), dst.scalar)
            return original(self, src, dst, *mode)

        return convert

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = fixed(cast), fixed(fp_to_fp)


def _fix_operators() -> None:
    binary = InterpreterBuilder.binary_op
    unary = InterpreterBuilder.unary_op
    atomic = InterpreterBuilder.create_atomic_rmw

    def binary_op(self, lhs, rhs, op):
        if not _is_narrow(lhs, rhs):
            return binary(self, lhs, rhs, op)
        if op not in EXACT:
            _refuse(op.__name__)
        out = op(decode(lhs), decode(rhs))
        scalar = lhs.dtype.scalar
        return TensorHandle(out if out.dtype == np.bool_ else encode(out, scalar), scalar)

    def unary_op(self, arg, op):
        if not _is_narrow(arg):
            return unary(self, arg, op)
        if op is not np.negative:
            _refuse(op.__name__)
        return TensorHandle(encode(op(decode(arg)), arg.dtype.scalar), arg.dtype.scalar)

    def create_dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        if acc.data.dtype.kind != "f":
            out = np.matmul(a.data, b.data, dtype=acc.data.dtype)
        else:
            wide = np.float64 if acc.data.dtype == np.float64 else np.float32
            out = np.matmul(decode(a).astype(wide), decode(b).astype(wide))
        return TensorHandle((out + acc.data).astype(acc.data.dtype), acc.dtype.scalar)

    def create_atomic_rmw(self, op, ptr, value, mask, sem, scope):
        if _is_narrow(value):
            _refuse("atomic")
        return atomic(self, op, ptr, value, mask, sem, scope)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _fix_reductions() -> None:
    def guarded(original, what):
        def apply_impl(self, arg):
            args = arg if isinstance(arg, tuple) else (arg,)
            if _is_narrow(*(x.handle for x in args)):
                _refuse(what)
            return original(self, arg)

        return apply_impl

    interpreter.ReduceOps.apply_impl = guarded(interpreter.ReduceOps.apply_impl, "reduction")
    interpreter.ScanOps.apply_impl = guarded(interpreter.ScanOps.apply_impl, "scan")


def _fix_index() -> None:
    # triton < 3.7 calls int() on an array of one element in range(0, K, BLOCK_K), which numpy >=
    # 2.4 rejects
    patch = interpreter._patch_lang_tensor

    def index(self) -> int:
        return int(self.handle.data.reshape(-1)[0])

    def patch_tensor(tensor, *rest):
        result = patch(tensor, *rest)
        if rest and hasattr(rest[-1], "set_attr"):
            rest[-1].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index
        return result

    interpreter._patch_lang_tensor = patch_tensor
