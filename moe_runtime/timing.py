"""Times on a GPU: what the tuner and the benchmarks read off the clock."""

from collections.abc import Callable, Iterable

import torch


class EventTimer:
    """Milliseconds that the GPU works, between two events; every call finds the L2 cache full of something else.

    The GPU sleeps before each call, so that the call's launches are queued by the time its first kernel runs.
    """

    def __init__(self, device: torch.device, ahead_ms: float = 0.2):
        size = max(torch.cuda.get_device_properties(device).L2_cache_size, 1 << 24)
        self.other = torch.zeros(size, dtype=torch.float32, device=device)  # four times the cache
        self.cycles = int(ahead_ms * 1.5e6)
        self.device = device

    def round(self, functions: Iterable[Callable[[], object]]) -> list[float]:
        """Call each function once."""
        pairs = []
        for function in functions:
            self.other.sum()  # reading leaves no line to be written back while the call runs
            torch.cuda._sleep(self.cycles)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            function()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]
