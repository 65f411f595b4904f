"""The grouped GEMMs with every launch config of `kernels.tiles`, launched like `ops.moe_mlp_triton`
and `ops.grouped_gemm`.
"""

import torch

from moe_runtime.kernels import grouped_gemm, operands, tiles
from moe_runtime.kernels import grouped_gemm_backward as backwards
from moe_runtime.kernels.tiles import Tile
from tests.support.aot import CORES, Case, cases_of, meta, name_of, record

ACTS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
T = 4096
H = 2048
I = 1408
E = 8
K = 6
GPT_OSS = {"limit": 7.0, "up_offset": 1.0, "interleaved": True}
# known spills: (architecture, note) -> Triton version -> bytes. Without 16-byte alignment every
# element has its own address; 8 bytes are one register that ptxas spills to fit one more block per
# processor
SPILLS = {
    (80, "up float32 from 0 rows an expert"): {"3.6": 8, "3.7": 0, "3.9": 0},
    (80, "up float32 from 48 rows an expert"): {"3.6": 0, "3.7": 0, "3.9": 16},
    (90, "up float32 from 48 rows an expert"): {"3.6": 8, "3.7": 0, "3.9": 0},
    (90, "dz no wh"): {"3.6": 0, "3.7": 0, "3.9": 24},
    (80, "dz GPT-OSS-20B from 192 rows an expert"): {"3.6": 40, "3.7": 0, "3.9": 0},
    (80, "dz LoRA, GPT-OSS-20B"): {"3.6": 48, "3.7": 0, "3.9": 96},
    (90, "dz LoRA, GPT-OSS-20B"): {"3.6": 0, "3.7": 0, "3.9": 24},
}


class Layer:
    """A layer's tensors, with one dtype.

    `odd`: H and I are odd, so no stride keeps 16-byte alignment. `split`: the weights of trained
    experts are in separate stacks. `form`: of the gate. `in_out`: the stacks are stored as [E, H,
    2I] and [E, I, H]. `rank`: of LoRA, with B stored as [r, E, out].
    """

    def __init__(
        self,
        dtype=torch.bfloat16,
        gated=True,
        bias=False,
        odd=False,
        split=False,
        form=None,
        in_out=False,
        sizes=(H, I, E, K),
        rank=0,
    ):
        h, i, experts, self.K = sizes
        h += odd
        i += odd
        z = 2 * i if gated else i
        self.form = form or {}
        self.dtype = dtype
        self.gated = gated
        self.odd = odd
        self.x = meta(T, h, dtype=dtype)
        self.z = meta(T * self.K, z, dtype=dtype)
        self.h = meta(T * self.K, i, dtype=dtype)
        self.up = meta(experts, z, h, dtype=dtype)
        self.down = meta(experts, h, i, dtype=dtype)
        self.up_bias = meta(experts, z, dtype=dtype) if bias else None
        self.down_bias = meta(experts, h, dtype=dtype) if bias else None
        self.weight = meta(T, self.K, dtype=torch.float32)
        self.row_slot = meta(T * self.K)
        self.offsets = meta(experts + 1)
        self.place = meta(experts)
        self.map = meta(3, T * self.K // 64 + experts + 1)
        if in_out:
            self.up = self.up.transpose(1, 2).contiguous().transpose(1, 2)
            self.down = self.down.transpose(1, 2).contiguous().transpose(1, 2)
        self.trained = {}
        if split:
            for name, stack in (("up", self.up), ("down", self.down)):
                stack = meta(2, *stack.shape[1:], dtype=dtype)
                self.trained[name] = operands.Trained(self.place, stack)
        self.lora = {}
        if rank:
            low = meta(T * self.K, rank, dtype=dtype)
            for name, n in (("up", z), ("down", h), ("dx", h), ("dz", i)):
                b = meta(rank, experts, n, dtype=dtype).transpose(0, 1)
                self.lora[name] = {"lora": operands.LowRank(low, b)}

    def options(self, product: str) -> dict:
        """Return the form of the gate, if any, and the low-rank term."""
        form = self.form if product in ("up", "dz") else {}
        return form | self.lora.get(product, {})

    def up_forward(self, tile, act="silu", save=True):
        return grouped_gemm.up_forward(
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
            self.trained.get("up"),
            **self.options("up"),
        )

    def down_forward(self, tile):
        args = (self.h, self.down, self.down_bias, self.map, True, tile, self.trained.get("down"))
        return grouped_gemm.grouped_gemm_forward(
            *args,
            **self.options("down"),
        )

    def dx(self, tile):
        args = (self.z, self.up, None, self.map, False, tile, self.trained.get("up"))
        return grouped_gemm.grouped_gemm_forward(*args, **self.options("dx"))

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
            self.trained.get("down"),
            **self.options("dz"),
        )

    def dw(self, tile, gather="x", **trained):
        """gather None is the launch of `grouped_gemm`, "x" the gradient of up, "dy" that of
        down.
        """
        dy, x = {
            "x": (self.z, self.x),
            "dy": (self.x, self.h),
            None: (self.z, self.h),
        }[gather]
        args = (dy, x, self.row_slot, self.offsets, self.K, gather, tile)
        return backwards.weight_backward(*args, **trained)

    def db(self, of_down: bool, trained=None):
        dy = self.x if of_down else self.z
        weight = self.weight if of_down else None
        args = (dy, weight, self.row_slot, self.offsets, self.K, of_down, trained)
        return backwards.bias_backward(*args)


def launched(layer: Layer, kernel: str, tile: Tile, **options) -> Case:
    """Record the only launch of a product."""
    method = {"up": "up_forward", "down": "down_forward"}.get(kernel, kernel)
    (made,) = record(lambda: getattr(layer, method)(tile, **options))
    return made


def expect(arch: int, case: Case) -> tuple[str, ...]:
    """Return the instructions that the tile should use: tensor cores, TMA for descriptors, cp.async
    for pointers.
    """
    features = []
    has_descriptors = any(type.startswith("tensordesc") for type in case.types())
    if has_descriptors:
        features.append("tma")
    if "tokens" in case.signature or case.constant("GATHER") is not None or not has_descriptors:
        features.append("cp.async")
    features.append(CORES[arch] if case.constant("BLOCK_M") >= 64 else "mma.sync")
    return tuple(features)


def case(
    arch: int, kernel: str, tile: Tile, note="", listed=False, layer=None, sizes=(H, H), **options
) -> Case:
    """Return the launch of `kernel` on `arch` with `tile`, after fitting the tile to the GPU."""
    layer = layer or Layer()
    dtype = name_of(layer.dtype)
    problem = tiles.Problem(
        kernel,
        arch,
        dtype,
        *sizes,
        T,
        gated=kernel == "up" and layer.gated,
    )
    tile = tiles.clip(tile, problem)
    if kernel == "up" and layer.form.get("interleaved"):
        tile = tiles.in_turns(tile, arch)
    made = launched(layer, kernel, tile, **options)
    words = [kernel, "" if layer.dtype == torch.bfloat16 else dtype, note]
    note = " ".join(filter(None, words))
    is_fast = layer.dtype != torch.float32 and not layer.odd
    return made._replace(
        capabilities=(arch,),
        expect=expect(arch, made) if is_fast else (),
        listed=listed,
        note=note,
        stack=SPILLS.get((arch, note), {}),
    )


def table_of(arch: int, *kernels: str):
    """Yield the table's configs: kernel, minimum rows per expert, tile."""
    for kernel, rows in tiles.TABLE[arch].items():
        if not kernels or kernel in kernels:
            for least, tile in rows:
                yield kernel, least, tile


def defaults(arch: int, table: dict, dtype=torch.bfloat16):
    """Every config of `table`, for a gated layer in training."""
    for kernel, rows in table.items():
        for least, tile in rows:
            yield case(
                arch,
                kernel,
                tile,
                f"from {least} rows an expert",
                True,
                Layer(dtype),
            )


def short_sums(arch: int):
    """Down and dx where `tiles.heuristic` overlaps the next tile's loads with the epilogue, which
    adds a bias.
    """
    for kernel in ("down", "dx"):
        tile = largest(arch, kernel)._replace(PERSISTENT=True)
        yield case(arch, kernel, tile, "short sums", True)
    yield case(arch, "down", tile, "short sums, bias", layer=Layer(bias=True))


def largest(arch: int, kernel: str) -> Tile:
    return tiles.TABLE[arch][kernel][0][1]


# other options of a product's launch
VARIANTS = {
    "up": {
        "without a gate": {"layer": Layer(gated=False)},
        "z not kept": {"save": False},
        "without a gate, z not kept": {"layer": Layer(gated=False), "save": False},
    },
    "dz": {
        "without a gate": {"layer": Layer(gated=False)},
        "no wh": {"need_wh": False},
    },
    "dw": {"of down": {"gather": "dy"}, "in order": {"gather": None}},
}


def variants(arch: int):
    """Other ways to launch each config: layers without a gate, inference, unneeded gradients,
    fp16.
    """
    for kernel in tiles.TABLE[arch]:
        yield case(
            arch,
            kernel,
            largest(arch, kernel),
            layer=Layer(torch.float16),
        )
    for kernel, _, tile in table_of(arch):
        for note, options in VARIANTS.get(kernel, {}).items():
            yield case(arch, kernel, tile, note, **options)


# additions to a product's epilogue, or cases without the fast loads
RARE = {
    **{act: (("up", "dz"), {"act": act}) for act in ACTS[1:]},
    "bias": (("up", "down", "dz"), {"layer": Layer(bias=True)}),
    "clamped": (("up", "dz"), {"layer": Layer(form={"limit": 7.0})}),
    "apart": (("up", "down", "dx", "dz"), {"layer": Layer(split=True)}),
}


def rare(arch: int):
    """The largest configs with the rare options."""
    for note, (kernels, options) in RARE.items():
        for kernel in kernels:
            yield case(arch, kernel, largest(arch, kernel), note, **options)
    for kernel, rows in tiles.UNALIGNED.items():
        for least, tile in rows:
            note = f"odd sizes from {least} rows an expert"
            yield case(arch, kernel, tile, note, layer=Layer(odd=True))
    layer = Layer()
    tile = largest(arch, "dw")
    into = meta(*layer.up.shape, dtype=torch.float32)
    yield case(arch, "dw", tile, "frozen experts", trained=layer.place)
    yield case(arch, "dw", tile, "added to float32", into=into)
    yield case(arch, "dw", tile, "apart", trained=layer.place, num_trained=2)


GPT_OSS_SIZES = {
    "bias": True,
    "form": GPT_OSS,
    "in_out": True,
    "sizes": (2880, 2880, 32, 4),
}


def gpt_oss_case(arch: int, kernel: str, tile: Tile, note: str, listed=False, rank=0, **options):
    """A launch of GPT-OSS-20B: interleaved gate and up, clamped, with biases, stacks stored in x
    out, so that n is contiguous.
    """
    if kernel in ("up", "dz"):
        options["act"] = "quick_gelu"
    layer = Layer(**GPT_OSS_SIZES, rank=rank)
    return case(
        arch,
        kernel,
        tile,
        note,
        listed,
        layer,
        (2880, 2880),
        **options,
    )


def gpt_oss(arch: int):
    """Every config for GPT-OSS-20B."""
    for kernel, least, tile in table_of(arch, "up", "dz", "down", "dx"):
        note = f"GPT-OSS-20B from {least} rows an expert"
        yield gpt_oss_case(arch, kernel, tile, note, arch in (80, 90))
    layer = Layer(**GPT_OSS_SIZES)
    yield case(
        arch,
        "up",
        largest(arch, "up"),
        "GPT-OSS-20B, z not kept",
        layer=layer,
        save=False,
        act="quick_gelu",
    )


def adapters(arch: int):
    """Every config with a low-rank term in its epilogue: LoRA on Qwen3-30B-A3B, and the largest
    config of GPT-OSS-20B.
    """
    layer = Layer(sizes=(2048, 768, 128, 8), rank=16)
    for kernel, least, tile in table_of(arch, "up", "down", "dz", "dx"):
        note = f"LoRA from {least} rows an expert"
        yield case(arch, kernel, tile, note, layer=layer, sizes=(2048, 768))
    for kernel in ("up", "down", "dz", "dx"):
        yield gpt_oss_case(
            arch,
            kernel,
            largest(arch, kernel),
            "LoRA, GPT-OSS-20B",
            rank=16,
        )
    if arch == 90:
        short = largest(arch, "down")._replace(PERSISTENT=True)
        for kernel in ("down", "dx"):
            yield case(arch, kernel, short, "LoRA, short sums", layer=layer)


def biases():
    """The biases' gradients, which have no configs."""
    layer = Layer()
    yield from cases_of(lambda: layer.db(False), note="of up")
    yield from cases_of(lambda: layer.db(True), note="of down")
    yield from cases_of(
        lambda: layer.db(True, layer.place),
        note="of down, frozen experts",
    )


def gathered(arch: int) -> Case:
    """The product of gathered rows with LoRA's A."""
    layer = Layer()
    tile = largest(arch, "down")._replace(BLOCK_N=16)
    weight = meta(E, 16, H, dtype=layer.dtype)
    args = (layer.x, weight, layer.row_slot, layer.map, layer.K, tile)
    (made,) = record(lambda: grouped_gemm.gathered_gemm_forward(*args))
    return made._replace(
        capabilities=(arch,), note="gathered rows alone", expect=expect(arch, made)
    )


def tf32(arch: int):
    """The largest configs for float32 with torch.backends.cuda.matmul.allow_tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for kernel, rows in tiles._FLOAT32.items():
            yield case(
                arch,
                kernel,
                rows[0][1],
                "tf32",
                layer=Layer(torch.float32),
            )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def persistent(arch: int):
    """Configs that `moe-runtime tune` may choose: the table's, with each program processing several
    tiles.
    """
    for kernel, _, tile in table_of(arch, "down", "dx"):
        yield case(arch, kernel, tile._replace(PERSISTENT=True), "candidate")


def _cases():
    for arch in tiles.TABLE:
        yield from defaults(arch, tiles.TABLE[arch])
    for arch in (80, 86, 90, 100):
        yield from variants(arch)
    for arch in (80, 86, 90, 100, 120):
        yield from gpt_oss(arch)
    for arch in (80, 90):
        yield from defaults(arch, tiles._FLOAT32, torch.float32)
        yield from tf32(arch)
        yield from rare(arch)
        yield from adapters(arch)
        yield gathered(arch)
    yield from persistent(90)
    yield from short_sums(90)
    yield from biases()


CASES = list(_cases())
