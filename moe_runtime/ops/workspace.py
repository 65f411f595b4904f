"""Memory that the torch backend reuses instead of allocating it again.

A new 138 MB buffer costs 52 ms of page faults on the CPU, a reused one 4 ms (2 cores, 2026-11-20):
at XFT's shape that is a fifth of the forward pass. `scratch` is for buffers used within one call,
`lease` for CPU tensors that outlive it.
"""

import ctypes
import math
import mmap
import threading
import weakref

import torch
from torch import Tensor


class _Buffers(dict):
    """A thread's scratch memory by name, dtype, device and stream; it can be referenced weakly."""


_local = threading.local()
# autograd has one per GPU
_threads: weakref.WeakValueDictionary[int, _Buffers] = weakref.WeakValueDictionary()
LEASE_FROM = 1 << 20  # bytes; smaller tensors come from the allocator's own free lists


def scratch(
    name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an uninitialized tensor of `shape`, until the next call with this `name`.

    Each thread and stream has its own.
    """
    dtype = dtype or like.dtype
    # a CUDA graph needs its own memory
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.empty(shape, dtype=dtype, device=like.device)
    size = math.prod(shape)
    buffers = _buffers()
    key = (name, dtype, like.device, stream_of(like.device))
    buffer = buffers.get(key)
    if buffer is None or buffer.numel() < size:
        buffer = None
        buffers.pop(key, None)  # frees the smaller one first
        # otherwise the buffer could not be written outside of inference mode
        with torch.inference_mode(False):
            buffers[key] = buffer = torch.empty(size, dtype=dtype, device=like.device)
    return buffer[:size].view(shape)


def stream_of(device: torch.device) -> int | None:
    """Return the stream in which `device` runs this thread's work; None without streams."""
    if device.type in ("cpu", "meta"):
        return None
    streams = torch.get_device_module(device)
    if not hasattr(streams, "current_stream"):
        return None
    return streams.current_stream(device).stream_id


def _buffers() -> _Buffers:
    """Return this thread's scratch memory."""
    if not hasattr(_local, "buffers"):
        _local.buffers = _Buffers()
        _threads[id(_local.buffers)] = _local.buffers
    return _local.buffers


class _Pool:
    """Free blocks of memory.

    Used and free bytes together never exceed the most that was in use at once.
    """

    def __init__(self) -> None:
        # reentrant, as the garbage collector may return a block while this thread takes one
        self.lock = threading.RLock()
        self.free: list[mmap.mmap] = []
        self.used = self.peak = 0

    def take(self, size: int) -> mmap.mmap:
        """Return the smallest free block of `size` to 2 `size` bytes, or a new one."""
        with self.lock:
            fitting = [block for block in self.free if size <= len(block) <= 2 * size]
            block = min(fitting, key=len, default=None)
            if block is None:
                block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                self.free.remove(block)
            self.used += len(block)
            self.peak = max(self.peak, self.used)
            self._trim()
            return block

    def give_back(self, block: mmap.mmap) -> None:
        """Return a block that no tensor uses any more to the pool."""
        with self.lock:
            self.used -= len(block)
            self.free.append(block)
            self._trim()

    def _trim(self) -> None:
        """Drop the blocks that were free longest until the bound holds."""
        while self.free and self.used + sum(map(len, self.free)) > self.peak:
            self.free.pop(0)

    def release(self) -> None:
        """Drop all free blocks and forget the peak."""
        with self.lock:
            self.free.clear()
            self.peak = self.used


_pool = _Pool()


def lease(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialized tensor of `shape`, whose memory on the CPU is reused once freed."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LEASE_FROM:
        return like.new_empty(shape)
    block = _pool.take(size)
    owner = (ctypes.c_char * size).from_buffer(block)
    weakref.finalize(owner, _pool.give_back, block).atexit = False
    return torch.frombuffer(owner, dtype=like.dtype).view(shape)


def release() -> None:
    """Return to the system every thread's scratch memory and every free lease."""
    for one in _threads.valuerefs():
        if (buffers := one()) is not None:
            buffers.clear()  # a running call keeps its own buffers alive
    _pool.release()
