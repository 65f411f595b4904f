"""Times on a GPU, and how far two results are apart: what the tuner and the benchmarks share."""

import statistics
from collections.abc import Callable, Hashable, Iterable

import torch

LOSER = 1.25  # slower than the best by this factor after three rounds: not timed any more


class EventTimer:
    """Milliseconds that the GPU works, between two events; every call finds the L2 cache full of something else.

    The GPU sleeps before each call, so that the call's launches are queued by the time its first kernel runs.
    """

    def __init__(self, device: torch.device, ahead_ms: float = 0.2):
        size = max(torch.cuda.get_device_properties(device).L2_cache_size, 1 << 24)
        self.other = torch.zeros(size, dtype=torch.float32, device=device)  # four times the cache
        self.cycles = int(ahead_ms * 2e6)  # GPUs run at 2 GHz at most: it sleeps no shorter
        self.device = device

    def round(self, functions: Iterable[Callable[[], object]]) -> list[float]:
        """Call each function once, in turn; return their milliseconds."""
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


def time_all(
    functions: dict[Hashable, Callable[[], object]], timer, rounds: int, seconds: float
) -> dict[Hashable, float]:
    """Median milliseconds of each, all in turn in every round; who is far behind after three rounds is left there.

    The first one stays to the end. After five rounds the next one begins only while all took less than `seconds`.
    """
    times = {name: [] for name in functions}
    left, spent, medians = list(functions), 0.0, {}
    for n in range(1, rounds + 1):
        for name, ms in zip(left, timer.round([functions[name] for name in left])):
            times[name].append(ms)
            spent += ms / 1e3
        medians = {name: statistics.median(values) for name, values in times.items()}
        if n == 3:
            limit = LOSER * min(medians.values())
            left = [name for i, name in enumerate(left) if i == 0 or medians[name] <= limit]
        if n >= 5 and spent > seconds:
            break
    return medians


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest norm of a row's difference over the root mean square of the rows' norms, of two tensors [..., n].

    inf for other shapes, no number if a NaN is anywhere.
    """
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t[:, None] for t in (got, want))
    step = max(1, (1 << 28) // want.shape[1])  # a float32 copy of all could be too much
    errors, norms = [], []
    for a, b in zip(got.split(step), want.split(step)):
        b = b.float()
        norms.append(b.square().sum())
        errors.append((a.float() - b).square().sum(1).max())
    rms = torch.stack(norms).sum() / len(want)
    return float((torch.stack(errors).max() / rms.clamp_min(1e-30)).sqrt())
