"""The grouped GEMMs over packed stacks: every format and direction on the most common GPUs, with
and without adapters.
"""

import torch

from moe_runtime.kernels import tiles
from moe_runtime.kernels.operands import LowRank
from moe_runtime.kernels.packed import PackedWeight, fit_packed
from moe_runtime.ops.packed import FORMATS
from tests.support.aot import CORES, meta
from tests.support.aot_cases import grouped_gemm
from tests.support.aot_cases.grouped_gemm import GPT_OSS, E, H, I, K, T

RANK = 16
SPILLS = {(80, "up fp8_block from 192 rows an expert"): {"3.6": 360, "3.7": 0, "3.9": 0}}


def weight(name: str, out: int, into: int, transposed: bool = False) -> PackedWeight:
    """A packed stack [E, out, into] on the meta device."""
    fmt = FORMATS[name]
    P, Q = (into, out) if transposed else (out, into)
    groups = 1 if fmt.group is None else -(-Q // fmt.group)
    data = meta(E, P, Q * fmt.data_bits // 8, dtype=torch.uint8)
    scale = meta(E, P, groups, dtype=torch.float32)
    return PackedWeight(data, scale, fmt.number, (E, out, into), transposed)


class Layer(grouped_gemm.Layer):
    """A 16-bit layer with packed stacks; its products add a low-rank term, like those of
    `frozen_mlp`.
    """

    def __init__(self, name: str, transposed: bool = False, **options):
        super().__init__(**options)
        self.up = weight(name, 2 * I, H, transposed)
        self.down = weight(name, H, I, transposed)
        low = meta(T * K, RANK, dtype=self.dtype)
        for product, n in (("up", 2 * I), ("down", H), ("dx", H), ("dz", I)):
            b = meta(E, RANK, n, dtype=self.dtype)
            self.lora[product] = {"lora": LowRank(low, b)}


def cases(arch: int, name: str, layer: Layer, note: str, all_tiles: bool, **options):
    """Every direction of a format, with each tile of the table or the largest one."""
    for kernel in ("up", "down", "dx", "dz"):
        rows = tiles.TABLE[arch][kernel]
        for least, tile in rows if all_tiles else rows[:1]:
            problem = tiles.Problem(
                kernel,
                arch,
                "bfloat16",
                H,
                H,
                T,
                gated=kernel == "up",
            )
            tile = fit_packed(
                tiles.clip(tile, problem),
                kernel,
                FORMATS[name].number,
            )
            if layer.form.get("interleaved") and kernel == "up":
                tile = tiles.in_turns(tile, arch)
            act = options if kernel in ("up", "dz") else {}
            made = grouped_gemm.launched(layer, kernel, tile, **act)
            where = f"{kernel} {name}{note} from {least} rows an expert"
            yield made._replace(
                capabilities=(arch,),
                expect=(CORES[arch] if tile.BLOCK_M >= 64 else "mma.sync",),
                note=where,
                stack=SPILLS.get((arch, where), {}),
            )


def _cases():
    for arch in (80, 90):
        for name in FORMATS:
            yield from cases(arch, name, Layer(name), "", name == "nf4")
        yield from cases(arch, "nf4", Layer("nf4", True), " [in, out]", False)
        layer = Layer("mxfp4", form=GPT_OSS)
        yield from cases(
            arch,
            "mxfp4",
            layer,
            " GPT-OSS",
            False,
            act="quick_gelu",
        )


CASES = list(_cases())
