"""The grouped GEMMs with every launch config of `kernels.tiles`, launched as `ops.moe_mlp_triton`
and `ops.grouped_gemm` do.
"""

import torch

from moe_runtime.kernels import grouped_gemm, operands, tiles
from moe_runtime.kernels import grouped_gemm_backward as backwards
from moe_runtime.kernels.tiles import Tile
from tests.support.aot import Case, record

ACTS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
T = 4096
H = 2048
I = 1408
E = 8
K = 6
GPT_OSS = {"limit": 7.0, "up_offset": 1.0, "interleaved": True}
# what spills: (architecture, note) -> Triton -> bytes. Without 16 bytes of alignment every element
# has an address of its own; 8 bytes are one register that ptxas keeps elsewhere for the sake of one
# more block per processor
SPILLS = {
    (80, "up float32 from 0 rows an expert"): {"3.6": 8, "3.7": 0, "3.9": 0},
    (80, "up float32 from 48 rows an expert"): {"3.6": 0, "3.7": 0, "3.9": 16},
    (90, "up float32 from 48 rows an expert"): {"3.6": 8, "3.7": 0, "3.9": 0},
    (90, "dz no wh"): {"3.6": 0, "3.7": 0, "3.9": 24},
    (90, "up candidate"): {"3.6": 0, "3.7": 0, "3.9": 24},
    (80, "dz GPT-OSS-20B from 192 rows an expert"): {"3.6": 40, "3.7": 0, "3.9": 0},
    (80, "dz LoRA, GPT-OSS-20B"): {"3.6": 48, "3.7": 0, "3.9": 96},
    (90, "dz LoRA, GPT-OSS-20B"): {"3.6": 0, "3.7": 0, "3.9": 24},
}


def meta(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Layer:
    """A layer's tensors, of one dtype.

    `odd`: H and I are, so no stride keeps 16 bytes of alignment. `apart`: trained experts' weights
    lie in stacks of their own. `form`: of the gate; `in_out`: the stacks are stored as [E, H, 2I]
    and [E, I, H]; `rank`: of LoRA, B stored as [r, E, out].
    """

    def __init__(
        self,
        dtype=torch.bfloat16,
        gated=True,
        bias=False,
        odd=False,
        apart=False,
        form=None,
        in_out=False,
        sizes=(H, I, E, K),
        rank=0,
    ):
        h, i, E, K = sizes
        h = h + odd
        i = i + odd
        self.K = K
        self.form = form or {}
        z = 2 * i if gated else i
        self.dtype = dtype
        self.gated = gated
        self.odd = odd
        self.x, self.z, self.h = (
            meta(*shape, dtype=dtype) for shape in ((T, h), (T * K, z), (T * K, i))
        )
        self.up, self.down = meta(E, z, h, dtype=dtype), meta(E, h, i, dtype=dtype)
        self.up_bias, self.down_bias = (meta(E, n, dtype=dtype) if bias else None for n in (z, h))
        self.weight = meta(T, K, dtype=torch.float32)
        self.row_slot, self.offsets, self.place = meta(T * K), meta(E + 1), meta(E)
        self.map = meta(3, T * K // 64 + E + 1)
        if in_out:
            self.up, self.down = (
                w.transpose(1, 2).contiguous().transpose(1, 2) for w in (self.up, self.down)
            )
        stacks = (meta(2, *w.shape[1:], dtype=dtype) for w in (self.up, self.down))
        low = meta(T * K, rank, dtype=dtype)
        halves = {"up": z, "down": h, "dx": h, "dz": i}
        self.lora = {
            name: {"lora": operands.LowRank(low, meta(rank, E, n, dtype=dtype).transpose(0, 1))}
            if rank
            else {}
            for name, n in halves.items()
        }
        self.trained = [operands.Trained(self.place, w) if apart else None for w in stacks]

    def up_forward(self, tile, act="silu", save=True):
        args = (
            self.x,
            self.up,
            self.up_bias,
            self.row_slot,
            self.map,
            self.K,
            act,
            self.gated,
            save,
            tile,
        )
        return grouped_gemm.up_forward(*args, self.trained[0], **self.form, **self.lora["up"])

    def down_forward(self, tile):
        args = (self.h, self.down, self.down_bias, self.map, True, tile, self.trained[1])
        return grouped_gemm.grouped_gemm_forward(*args, **self.lora["down"])

    def dx(self, tile):
        args = (self.z, self.up, None, self.map, False, tile, self.trained[0])
        return grouped_gemm.grouped_gemm_forward(*args, **self.lora["dx"])

    def dz(self, tile, act="silu", need_wh=True):
        return backwards.dz_backward(
            self.x,
            self.down,
            self.down_bias,
            self.weight,
            self.row_slot,
            self.map,
            self.z,
            act,
            self.gated,
            need_wh,
            tile,
            self.trained[1],
            **self.form,
            **self.lora["dz"],
        )

    def dw(self, tile, gather="x", **trained):
        """gather None is what `grouped_gemm` does, "x" the gradient of up, "dy" of down."""
        dy, x = {"x": (self.z, self.x), "dy": (self.x, self.h), None: (self.z, self.h)}[gather]
        return backwards.weight_backward(
            dy, x, self.row_slot, self.offsets, self.K, gather, tile, **trained
        )

    def db(self, of_down: bool, trained=None):
        dy, weight = (self.x, self.weight) if of_down else (self.z, None)
        return backwards.bias_backward(
            dy, weight, self.row_slot, self.offsets, self.K, of_down, trained
        )


LAUNCH = {
    "up": Layer.up_forward,
    "down": Layer.down_forward,
    "dx": Layer.dx,
    "dz": Layer.dz,
    "dw": Layer.dw,
}


def expect(arch: int, case: Case) -> tuple[str, ...]:
    """Which instructions make the tile what it is: tensor cores, TMA for descriptors, cp.async for
    what comes by pointer.
    """
    descriptors = sum(type.startswith("tensordesc") for type in case.types())
    gathers = "tokens" in case.signature or case.constant("GATHER") is not None
    found = ["tma"] * bool(descriptors) + ["cp.async"] * (gathers or not descriptors)
    if case.constant("BLOCK_M") >= 64:
        tensor = {90: "wgmma", 100: "tcgen05"}.get(arch, "mma.sync")
    else:
        tensor = "mma.sync"
    return (*found, tensor)


def case(
    arch: int, kernel: str, tile: Tile, note="", listed=False, layer=None, sizes=(H, H), **options
) -> Case:
    """The launch of `kernel` on `arch` with `tile`, as it is fitted to the GPU."""
    layer = layer or Layer()
    dtype = str(layer.dtype).removeprefix("torch.")
    problem = tiles.Problem(kernel, arch, dtype, *sizes, T, gated=kernel == "up" and layer.gated)
    tile = tiles.clip(tile, problem)
    if kernel == "up" and layer.form.get("interleaved"):
        tile = tiles.in_turns(tile, arch)
    (made,) = record(lambda: LAUNCH[kernel](layer, tile, **options))
    note = " ".join([kernel, *[dtype] * (layer.dtype != torch.bfloat16), *[note] * bool(note)])
    fast = layer.dtype != torch.float32 and not layer.odd
    return made._replace(
        capabilities=(arch,),
        expect=expect(arch, made) if fast else (),
        listed=listed,
        note=note,
        stack=SPILLS.get((arch, note), {}),
    )


def defaults(arch: int, table: dict, dtype=torch.bfloat16) -> list[Case]:
    """Every config of `table`, for a gated layer in training."""
    return [
        case(arch, kernel, tile, f"from {least} rows an expert", True, Layer(dtype))
        for kernel, rows in table.items()
        for least, tile in rows
    ]


def short_sums(arch: int) -> list[Case]:
    """Down and dx where `tiles.heuristic` lets the next tile's loads run under the epilogue, which
    a bias adds to.
    """
    found = []
    for kernel in ("down", "dx"):
        tile = tiles.TABLE[arch][kernel][0][1]._replace(PERSISTENT=True)
        found.append(case(arch, kernel, tile, "short sums", True))
    return [*found, case(arch, "down", tile, "short sums, bias", layer=Layer(bias=True))]


def variants(arch: int) -> list[Case]:
    """The other ways to launch each config: layers without a gate, inference, gradients that nobody
    asks for, fp16.
    """
    found = []
    plain = Layer(gated=False)
    half = Layer(torch.float16)
    for kernel, rows in tiles.TABLE[arch].items():
        found.append(case(arch, kernel, rows[0][1], layer=half))
        for _, tile in rows:
            if kernel == "up":
                found += [
                    case(arch, kernel, tile, "without a gate", layer=plain),
                    case(arch, kernel, tile, "z not kept", save=False),
                ]
                found.append(
                    case(arch, kernel, tile, "without a gate, z not kept", layer=plain, save=False)
                )
            elif kernel == "dz":
                found += [
                    case(arch, kernel, tile, "without a gate", layer=plain),
                    case(arch, kernel, tile, "no wh", need_wh=False),
                ]
            elif kernel == "dw":
                found += [
                    case(arch, kernel, tile, "of down", gather="dy"),
                    case(arch, kernel, tile, "in order", gather=None),
                ]
    return found


def rare(arch: int) -> list[Case]:
    """The largest configs with what adds to their epilogue, or takes the fast loads away."""
    largest = {kernel: rows[0][1] for kernel, rows in tiles.TABLE[arch].items()}
    biased = Layer(bias=True)
    odd = Layer(odd=True)
    apart = Layer(apart=True)
    found = [
        case(arch, kernel, largest[kernel], act, act=act)
        for act in ACTS[1:]
        for kernel in ("up", "dz")
    ]
    found += [
        case(arch, kernel, largest[kernel], "bias", layer=biased) for kernel in ("up", "down", "dz")
    ]
    clamped = Layer(form={"limit": 7.0})
    found += [
        case(arch, kernel, largest[kernel], "clamped", layer=clamped) for kernel in ("up", "dz")
    ]
    found += [
        case(arch, kernel, tile, f"odd sizes from {least} rows an expert", layer=odd)
        for kernel, rows in tiles.UNALIGNED.items()
        for least, tile in rows
    ]
    found += [
        case(arch, kernel, tile, "apart", layer=apart)
        for kernel, tile in largest.items()
        if kernel != "dw"
    ]
    found.append(case(arch, "dw", largest["dw"], "frozen experts", trained=apart.place))
    found.append(
        case(
            arch,
            "dw",
            largest["dw"],
            "added to float32",
            into=meta(*apart.up.shape, dtype=torch.float32),
        )
    )
    return [*found, case(arch, "dw", largest["dw"], "apart", trained=apart.place, num_trained=2)]


def gpt_oss(arch: int) -> list[Case]:
    """GPT-OSS-20B: gate and up in turns, clamped, biases, stacks stored in x out, so that n is
    contiguous.
    """
    layer = Layer(bias=True, form=GPT_OSS, in_out=True, sizes=(2880, 2880, 32, 4))
    found = []
    for kernel in ("up", "dz", "down", "dx"):
        act = {"act": "quick_gelu"} if kernel in ("up", "dz") else {}
        for least, tile in tiles.TABLE[arch][kernel]:
            note = f"GPT-OSS-20B from {least} rows an expert"
            found.append(
                case(arch, kernel, tile, note, arch in (80, 90), layer, sizes=(2880, 2880), **act)
            )
    tile = tiles.TABLE[arch]["up"][0][1]
    return [
        *found,
        case(
            arch, "up", tile, "GPT-OSS-20B, z not kept", False, layer, save=False, act="quick_gelu"
        ),
    ]


def adapters(arch: int) -> list[Case]:
    """Every config with a low-rank term in its epilogue: LoRA on Qwen3-30B-A3B; and GPT-OSS-20B's
    largest.
    """
    layer = Layer(sizes=(2048, 768, 128, 8), rank=16)
    found = []
    turns = Layer(bias=True, form=GPT_OSS, in_out=True, sizes=(2880, 2880, 32, 4), rank=16)
    for kernel in ("up", "down", "dz", "dx"):
        for least, tile in tiles.TABLE[arch][kernel]:
            found.append(
                case(
                    arch,
                    kernel,
                    tile,
                    f"LoRA from {least} rows an expert",
                    False,
                    layer,
                    sizes=(2048, 768),
                )
            )
        largest = tiles.TABLE[arch][kernel][0][1]
        act = {"act": "quick_gelu"} if kernel in ("up", "dz") else {}
        found.append(
            case(
                arch, kernel, largest, "LoRA, GPT-OSS-20B", False, turns, sizes=(2880, 2880), **act
            )
        )
    short = tiles.TABLE[arch]["down"][0][1]._replace(PERSISTENT=True)
    return [
        *found,
        *(
            case(arch, kernel, short, "LoRA, short sums", layer=layer)
            for kernel in ("down", "dx")
            if arch == 90
        ),
    ]


def biases() -> list[Case]:
    """The biases' gradients, which have no configs."""
    layer = Layer()
    steps = {"of up": (False,), "of down": (True,), "of down, frozen experts": (True, layer.place)}
    return [record(lambda: layer.db(*args))[0]._replace(note=note) for note, args in steps.items()]  # noqa: B023


def gathered(arch: int) -> Case:
    """The product of gathered rows with LoRA's A."""
    layer = Layer()
    tile = tiles.TABLE[arch]["down"][0][1]._replace(BLOCK_N=16)
    weight = meta(E, 16, H, dtype=layer.dtype)
    order = (layer.row_slot, layer.map, layer.K)
    (made,) = record(lambda: grouped_gemm.gathered_gemm_forward(layer.x, weight, *order, tile))
    return made._replace(
        capabilities=(arch,), note="gathered rows alone", expect=expect(arch, made)
    )


def tf32(arch: int) -> list[Case]:
    """What torch.backends.cuda.matmul.allow_tf32 makes of the largest configs for float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        layer = Layer(torch.float32)
        return [
            case(arch, kernel, rows[0][1], "tf32", layer=layer)
            for kernel, rows in tiles._FLOAT32.items()
        ]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def persistent(arch: int) -> list[Case]:
    """What `moe-runtime tune` may choose: the table's configs, each program taking tile
    after tile.
    """
    return [
        case(arch, kernel, tile._replace(PERSISTENT=True), "candidate")
        for kernel, rows in tiles.TABLE[arch].items()
        for _, tile in rows
        if kernel != "dw"
    ]


CASES = [case for arch in tiles.TABLE for case in defaults(arch, tiles.TABLE[arch])]
CASES += [case for arch in (80, 86, 90, 100) for case in variants(arch)]
CASES += [
    case
    for arch in (80, 90)
    for case in defaults(arch, tiles._FLOAT32, torch.float32) + tf32(arch) + rare(arch)
]
CASES += [case for arch in (80, 86, 90, 100, 120) for case in gpt_oss(arch)]
CASES += [case for arch in (80, 90) for case in adapters(arch)]
CASES += persistent(90) + short_sums(90) + biases() + [gathered(80), gathered(90)]
