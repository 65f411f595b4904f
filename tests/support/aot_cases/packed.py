"""The grouped GEMMs over packed stacks: every format and direction on the GPUs that most have, with
adapters and without.
"""

import torch

from moe_runtime.kernels import tiles
from moe_runtime.kernels.operands import LowRank
from moe_runtime.kernels.packed import PackedWeight, fit_packed
from moe_runtime.ops.packed import FORMATS
from tests.support.aot_cases import grouped_gemm
from tests.support.aot_cases.grouped_gemm import GPT_OSS, E, H, I, K, T, meta

RANK = 16


def weight(name: str, out: int, into: int, transposed: bool = False) -> PackedWeight:
    """A packed stack [E, out, into] on the meta device."""
    fmt, (P, Q) = FORMATS[name], (into, out) if transposed else (out, into)
    groups = 1 if fmt.group is None else -(-Q // fmt.group)
    data = meta(E, P, Q * fmt.data_bits // 8, dtype=torch.uint8)
    return PackedWeight(
        data, meta(E, P, groups, dtype=torch.float32), fmt.number, (E, out, into), transposed
    )


class Layer(grouped_gemm.Layer):
    """A layer of 16 bits whose stacks are packed; its products add a low-rank term, as those of
    `frozen_mlp` do.
    """

    def __init__(self, name: str, transposed: bool = False, **options):
        super().__init__(**options)
        self.up, self.down = weight(name, 2 * I, H, transposed), weight(name, H, I, transposed)

    def _lora(self, n: int) -> LowRank:
        return LowRank(meta(T * K, RANK, dtype=self.dtype), meta(E, RANK, n, dtype=self.dtype))

    def up_forward(self, tile, act="silu", save=True):
        args = (self.x, self.up, None, self.row_slot, self.map, self.K, act, True, save, tile)
        return grouped_gemm.grouped_gemm.up_forward(*args, **self.form, lora=self._lora(2 * I))

    def down_forward(self, tile):
        return grouped_gemm.grouped_gemm.grouped_gemm_forward(
            self.h, self.down, None, self.map, True, tile, lora=self._lora(H)
        )

    def dx(self, tile):
        return grouped_gemm.grouped_gemm.grouped_gemm_forward(
            self.z, self.up, None, self.map, False, tile, lora=self._lora(H)
        )

    def dz(self, tile, act="silu", need_wh=True):
        args = (
            self.x,
            self.down,
            None,
            self.weight,
            self.row_slot,
            self.map,
            self.z,
            act,
            True,
            need_wh,
            tile,
        )
        return grouped_gemm.backwards.dz_backward(*args, **self.form, lora=self._lora(I))


LAUNCH = {"up": Layer.up_forward, "down": Layer.down_forward, "dx": Layer.dx, "dz": Layer.dz}


def cases(arch: int, name: str, layer: Layer, note: str, all_tiles: bool, **options):
    """Every direction of a format, with each tile of the table or the largest."""
    for kernel, launch in LAUNCH.items():
        for least, tile in tiles.TABLE[arch][kernel][: None if all_tiles else 1]:
            problem = tiles.Problem(kernel, arch, "bfloat16", H, H, T, gated=kernel == "up")
            tile = fit_packed(tiles.clip(tile, problem), kernel, FORMATS[name].number)
            if layer.form.get("interleaved") and kernel == "up":
                tile = tiles.in_turns(tile, arch)
            act = options if kernel in ("up", "dz") else {}
            (made,) = grouped_gemm.record(lambda: launch(layer, tile, **act))  # noqa: B023
            dot = {90: "wgmma"}.get(arch, "mma.sync") if tile.BLOCK_M >= 64 else "mma.sync"
            where = f"{kernel} {name}{note} from {least} rows an expert"
            if (arch, where) == (80, "up fp8_block from 192 rows an expert"):
                stack = {"3.6": 360, "3.7": 0, "3.9": 0}
            else:
                stack = {}
            yield made._replace(capabilities=(arch,), expect=(dot,), note=where, stack=stack)


CASES = [
    c
    for arch in (80, 90)
    for name in FORMATS
    for c in cases(arch, name, Layer(name), "", name == "nf4")
]
CASES += [
    c for arch in (80, 90) for c in cases(arch, "nf4", Layer("nf4", True), " [in, out]", False)
]
for arch in (80, 90):
    CASES += cases(arch, "mxfp4", Layer("mxfp4", form=GPT_OSS), " GPT-OSS", False, act="quick_gelu")
