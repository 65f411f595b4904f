"""A compute-sanitizer for Triton's interpreter (triton 3.6 to 3.9).

- every unmasked lane of a load, store or atomic must be inside a tensor passed to the kernel
- lanes masked off without `other=` read NaN or the smallest integer instead of the interpreter's 0
- two programs that store to the same address, or one that reads what another stores, are a race
  (except for atomics)
"""

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


class KernelMemoryError(AssertionError):
    """A kernel accessed memory that does not belong to its tensors."""


class _Launch:
    """The current launch: the byte ranges [low, high) of its tensors, and which programs accessed
    what.
    """

    def __init__(self, ranges: list[tuple[int, int]]):
        self.low = np.array([low for low, _ in ranges], np.uint64)
        self.high = np.array([high for _, high in ranges], np.uint64)
        # ranges may nest, so an address is inside if any range that starts before it ends after it
        self.reach = np.maximum.accumulate(self.high) if ranges else self.high
        self.program = 0
        self.reads = []
        self.writes = []

    def check(self, kind: str, ptr, mask, size: int) -> None:
        """Raise unless all active lanes of `ptr`, `size` bytes each, are inside the tensors."""
        data = ptr.data
        active = np.asarray(mask.data).astype(bool, copy=False)
        if data.shape != active.shape:
            data, active = np.broadcast_arrays(data, active)
        address = data[active]
        if not address.size:
            return
        i = np.maximum(np.searchsorted(self.low, address, side="right") - 1, 0)
        inside = (address >= self.low[i]) & (address + np.uint64(size) <= self.reach[i])
        if not inside.all():
            bad = int(address[~inside][0])
            near = int(i[~inside][0])
            low = int(self.low[near])
            high = int(self.high[near])
            raise KernelMemoryError(
                f"{kind} out of bounds: {int((~inside).sum())} lane(s), the first at byte "
                f"{bad - low} of a tensor of {high - low} bytes, program "
                f"{interpreter.interpreter_builder.grid_idx}"
            )
        if kind != "atomic":
            (self.writes if kind == "store" else self.reads).append((self.program, address))

    def check_races(self) -> None:
        """Raise if two programs stored to the same address, or one read what another one stored."""
        if not self.writes:
            return
        address, program = _flatten(self.writes)
        order = np.lexsort((program, address))
        address = address[order]
        program = program[order]
        twice = (address[1:] == address[:-1]) & (program[1:] != program[:-1])
        if twice.any():
            raise KernelMemoryError(
                f"write race: {int(twice.sum())} address(es) stored by two programs, "
                f"e.g. {program[:-1][twice][0]} and {program[1:][twice][0]}"
            )
        if self.reads:
            read, reader = _flatten(self.reads)
            i = np.minimum(np.searchsorted(address, read), address.size - 1)
            raced = (address[i] == read) & (program[i] != reader)
            if raced.any():
                raise KernelMemoryError(
                    f"read/write race: program {reader[raced][0]} reads what program "
                    f"{program[i][raced][0]} stores"
                )


_launch: _Launch | None = None


def _flatten(accesses: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    programs = [np.full(address.size, program) for program, address in accesses]
    return np.concatenate([address for _, address in accesses]), np.concatenate(programs)


def _ranges(args) -> list[tuple[int, int]]:
    """Return the byte ranges of the tensors in `args`, including tuples and tensor descriptors."""
    found = []
    for arg in args:
        if isinstance(arg, (tuple, list)):
            found += _ranges(arg)
        elif hasattr(arg, "base") and hasattr(arg, "block_shape"):
            found += _ranges([arg.base])
        elif hasattr(arg, "data_ptr") and hasattr(arg, "untyped_storage"):
            # the extent of the view, not of its storage
            last = sum(
                (size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True)
            )
            elements = last + 1 if arg.numel() else 0
            found.append((arg.data_ptr(), arg.data_ptr() + elements * arg.element_size()))
    return found


def _size(ptr) -> int:
    return max(1, ptr.get_element_ty().primitive_bitwidth // 8)


def _poison(ptr) -> TensorHandle:
    dtype = interpreter._get_np_dtype(ptr.get_element_ty())
    # bf16 and fp8 are stored as these types
    nan_bits = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.uint8): 0x7F}
    if dtype.kind == "f":
        value = np.nan
    elif dtype.kind == "i":
        value = np.iinfo(dtype).min
    else:
        value = nan_bits.get(np.dtype(dtype), 0)
    return TensorHandle(np.full_like(ptr.data, value, dtype=dtype), ptr.get_element_ty())


def install() -> None:
    """Patch Triton's interpreter in this process, once."""
    if getattr(InterpreterBuilder, "_moe_san", False):
        return
    InterpreterBuilder._moe_san = True
    _watch_memory()
    _watch_launches()


def _watch_memory() -> None:
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store
    atomic = InterpreterBuilder.create_atomic_rmw

    def create_masked_load(self, ptrs, mask, other, *args, **kwargs):
        if _launch is not None:
            _launch.check("load", ptrs, mask, _size(ptrs))
            other = _poison(ptrs) if other is None else other
        return load(self, ptrs, mask, other, *args, **kwargs)

    def create_masked_store(self, ptrs, value, mask, *args, **kwargs):
        if _launch is not None:
            _launch.check("store", ptrs, mask, _size(ptrs))
        return store(self, ptrs, value, mask, *args, **kwargs)

    def create_atomic_rmw(self, op, ptr, value, mask, sem, scope):
        if _launch is not None:
            _launch.check("atomic", ptr, mask, _size(ptr))
        return atomic(self, op, ptr, value, mask, sem, scope)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _watch_launches() -> None:
    init = GridExecutor._init_args_hst
    call = GridExecutor.__call__
    set_index = InterpreterBuilder.set_grid_idx

    def init_args(self, args, kwargs):
        global _launch
        host_args, host_kwargs = init(self, args, kwargs)
        ranges = sorted(_ranges([*host_args, *host_kwargs.values()]))
        _launch = _Launch(ranges) if ranges else None
        return host_args, host_kwargs

    def set_grid_idx(self, x, y, z):
        if _launch is not None:
            _launch.program = (x * self.grid_dim[1] + y) * self.grid_dim[2] + z
        return set_index(self, x, y, z)

    def launch(self, *args, **kwargs):
        global _launch
        try:
            out = call(self, *args, **kwargs)
            if _launch is not None:
                _launch.check_races()
            return out
        finally:
            _launch = None

    GridExecutor._init_args_hst = init_args
    GridExecutor.__call__ = launch
    InterpreterBuilder.set_grid_idx = set_grid_idx
