"""The shapes of all benchmarks. E and K include a shared expert, as in the papers."""

from typing import NamedTuple

import torch

from moe_runtime.tools.layer_shapes import LAYERS


class Shape(NamedTuple):
    """T tokens, H hidden, I expert intermediate, E experts, K experts per token."""

    T: int
    H: int
    I: int
    E: int
    K: int
    shared: bool = False  # expert 0 sees every token


CPU = {
    "coarse": Shape(2048, 512, 1408, 8, 6, shared=True),  # a quarter of XFT on DeepSeek-Coder-1.3B
    "fine": Shape(2048, 512, 256, 64, 8),  # a quarter of OLMoE
}
GPU = {name: Shape(16384, *layer[:5]) for name, layer in LAYERS.items()}  # of published models
FINE = ("DeepSeek-V2-Lite", "OLMoE", "Qwen3-30B-A3B")  # many small experts: few rows each
TOKENS = (16384, 4096, 65536)  # most relevant first, as runs may be cut short
# Qwen3-30B-A3B with an eighth of its sizes and half of its experts
STEPS_CPU = {"tiny-Qwen3-MoE": Shape(1024, 256, 96, 64, 8)}
STEPS = {  # shapes of a training step, whose optimizer state also needs memory
    "Qwen3-30B-A3B": GPU["Qwen3-30B-A3B"],
    "XFT-DSCoder-1.3B": GPU["XFT-DSCoder-1.3B"],
}
MIXING = {"XFT-DSCoder-1.3B": GPU["XFT-DSCoder-1.3B"]}


class Adapted(NamedTuple):
    """A layer whose stacks have LoRA, and its dtype."""

    shape: Shape
    dtype: torch.dtype


ADAPTERS_CPU = {
    "coarse": Adapted(Shape(2048, 1024, 2816, 8, 2), torch.float32),
    "fine": Adapted(Shape(2048, 1024, 512, 64, 6), torch.float32),
    "E=128": Adapted(Shape(512, 2048, 768, 128, 8), torch.bfloat16),
}
ADAPTERS_GPU = {
    "Qwen3-30B-A3B-4096": Adapted(GPU["Qwen3-30B-A3B"]._replace(T=4096), torch.bfloat16)
}
ADAPTERS_TINY = {"tiny": Adapted(Shape(64, 64, 64, 4, 2), torch.float32)}


class Fusion(NamedTuple):
    """T response tokens, S specialists of hidden size H, V ids."""

    T: int
    H: int
    S: int = 3
    V: int = 32000


FUSION_CPU = {"V=32000": Fusion(1024, 256)}  # a twentieth of Llama-2-13B's hidden size
FUSION_GPU = {f"3xLlama-2-13B-{T}": Fusion(T, 5120) for T in (2048, 8192)}
FUSION_TINY = {"tiny": Fusion(24, 16, V=100)}
# not a model: keeps every benchmark running in the tests
TINY = {"tiny": Shape(64, 32, 48, 4, 2, shared=True)}


class Tuning(NamedTuple):
    """A step over `rows` sequences of `length` tokens of a Llama with L layers, `heads` and V ids,
    upcycled to E experts.
    """

    L: int
    rows: int
    length: int
    H: int
    I: int
    E: int
    K: int
    heads: int
    V: int

    @property
    def T(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


# DeepSeek-Coder-1.3B, upcycled as in XFT; the official batch per device is 2 sequences of 1024
_DS_CODER = Tuning(24, 2, 1024, 2048, 5504, 8, 6, 16, 32256)
TUNING_GPU = {
    "DSCoder-1.3B-24L-2x1024": _DS_CODER,
    "DSCoder-1.3B-24L-8x1024": _DS_CODER._replace(rows=8),
}
# the model of `make demo`, to measure a step of dense tuning and one of learning to mix
MIXING_STEP = {"small": Tuning(2, 16, 128, 96, 512, 4, 2, 3, 1024)}
MIXING_TINY = {"tiny": Tuning(2, 8, 128, 32, 64, 4, 2, 1, 512)}
# two layers of the same widths fit into 16 GiB
TUNING_CPU = {"DSCoder-1.3B-2L-2x128": _DS_CODER._replace(L=2, length=128)}
TUNING_TINY = {"tiny": Tuning(2, 2, 16, 64, 64, 4, 3, 2, 100)}
_QWEN3 = Tuning(48, 1, 1024, 2048, 768, 128, 8, 32, 151936)
QLORA_GPU = {"Qwen3-30B-A3B-4-layers": _QWEN3._replace(L=4), "Qwen3-30B-A3B": _QWEN3}
QLORA_CPU = {"tiny-Qwen3-MoE": Tuning(2, 1, 512, 512, 256, 16, 4, 8, 4096)}


class Dense(NamedTuple):
    """A Llama with L layers, `heads` and V ids, batches of T tokens; if upcycled, E experts and K
    per token.
    """

    T: int
    L: int
    H: int
    I: int
    heads: int
    V: int
    E: int = 8
    K: int = 6


METHODS_CPU = {"Llama-42M": Dense(1024, 2, 1024, 2816, 16, 8192)}
METHODS_GPU = {"DSCoder-1.3B": Dense(8192, 24, 2048, 5504, 16, 32256)}
METHODS_TINY = {"tiny": Dense(32, 2, 32, 48, 2, 100, 4, 3)}


def kernels() -> dict[str, Shape]:
    """The shapes of GPU at 16384 tokens, and those with small experts also at 4096."""
    return sweep(GPU, (16384,)) | sweep({name: GPU[name] for name in FINE}, (4096,))


def plans() -> dict[str, Shape]:
    """Few and many experts at T from 512, where launches matter, to 65536, where bytes do."""
    return sweep({name: GPU[name] for name in SWEPT}, (512, 2048, *sorted(TOKENS)))


def layers() -> dict[str, Shape]:
    """The shapes of GPU at every T of TOKENS."""
    layers = {}
    for T in TOKENS:
        layers |= sweep(GPU, (T,))
    return layers


DECODE = (1, 4, 16, 64, 256)  # tokens of a generation step or a short prompt
SWEEP_CPU = (*DECODE, 1024, 4096)
SWEEP_GPU = (*SWEEP_CPU, 16384, 65536)
SWEPT = ("XFT-DSCoder-1.3B", "OLMoE", "Qwen3-30B-A3B")  # of GPU: few large experts, many, very many


def sweep(table: dict[str, Shape], tokens: tuple[int, ...]) -> dict[str, Shape]:
    """Return the shapes of a table at each number of tokens."""
    sweep = {}
    for name, shape in table.items():
        for T in tokens:
            sweep[f"{name}-{T}"] = shape._replace(T=T)
    return sweep
