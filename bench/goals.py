"""Performance goals on a GPU and on a CPU, and a table of those met and missed."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from moe_runtime.bench import shapes
from moe_runtime.bench.described import markdown

HF = "transformers grouped_mm"
PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
PEFT = "PEFT, transformers grouped_mm"
NF4 = "moe_runtime, NF4"
NAIVE = "sum of logits, cross_entropy (naive)"
STEPS = ("bench_decoder_layer", "bench_training_step")


class Goal(NamedTuple):
    """A target, `least` or `most`, for a number of each of some benchmarks."""

    what: str
    benchmarks: list[str]
    value: object  # rows of one benchmark (variant -> row) -> number
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return value >= self.least if self.most is None else value <= self.most

    def want(self) -> str:
        return f">= {self.least:g}" if self.most is None else f"<= {self.most:g}"


def _layers(function: str, *tokens: int, names=tuple(shapes.GPU)) -> list[str]:
    return [f"{function}[{name}-{T}-bf16]" for T in tokens for name in names]


def _share(rows):
    return rows["moe_runtime"]["share"]


def _times(one: str, other: str, column: str = "ms"):
    return lambda rows: rows[one][column] / rows[other][column]


def _faster(variant: str):
    return _times(variant, "moe_runtime")


_of_all = _times("moe_runtime, apart", "all experts (floor)")
than_triton = _times("moe_runtime triton", "moe_runtime cuda")


def _saved(rows):
    return 1 - _of_all(rows)


def _gradients(rows):
    """Memory of the trained weights' gradients, as a share of that of all weights' gradients."""
    separate = rows["moe_runtime, apart"]["kept MiB"]
    whole = rows["all experts (floor)"]["kept MiB"]
    none = rows["no expert"]["kept MiB"]
    return (separate - none) / (whole - none)


def _each(function: str, *ways: str) -> list[str]:
    return [f"{function}[{name}-{way}]" for name in shapes.GPU for way in ways]


def _estimated(rows):
    """Peak memory as a multiple of its estimate."""
    return rows["moe_runtime"]["total MiB"] / rows["moe_runtime"]["estimate MiB"]


QLORA = [
    f"bench_qlora[Qwen3-30B-A3B-{setting}]"
    for setting in ("fp32-adamw", "attention-fp32-adamw", "bf16-adafactor", "bf16-adamw")
]
FUSED = [f"bench_fused_loss[V=32000-{train}]" for train in ("all", "gate")]
GOALS = (
    *(
        Goal(
            f"{what}, share of the nearer ceiling, {where}",
            _layers(function, *tokens, names=names),
            _share,
            least,
        )
        for where, tokens, names, leasts in (
            ("T >= 16384", (16384, 65536), tuple(shapes.GPU), (0.80, 0.72)),
            ("T = 4096, small experts", (4096,), ("OLMoE", "Qwen3-30B-A3B"), (0.55, 0.50)),
        )
        for (function, what), least in zip(PASSES.items(), leasts)
    ),
    Goal(
        f"forward + backward, speedup over {HF}",
        _layers("bench_forward_backward", *shapes.TOKENS),
        _faster(HF),
        2.0,
    ),
    Goal(
        f"forward, speedup over {HF}: never slower",
        _layers("bench_forward", *shapes.TOKENS),
        _faster(HF),
        1.0,
    ),
    Goal(
        f"layer and training step of a stock model, speedup over {HF}: never slower",
        [f"{function}[{name}-bf16]" for function in STEPS for name in shapes.STEPS],
        _faster(HF),
        1.0,
    ),
    Goal(
        "router, relative to a copy of its bytes, T = 16384",
        _each("bench_route", "forward", "backward"),
        _times("moe_runtime", "copy (floor)"),
        most=2.0,
    ),
    Goal(
        "merge and dalpha, share of a copy's bandwidth",
        _each("bench_merge_experts", "merge", "dalpha"),
        _times("copy (floor)", "moe_runtime triton"),
        0.85,
    ),
    Goal(
        "XFT's merge stage, forward + backward of a layer, speedup over the official form",
        [f"bench_mixing_layer[{name}]" for name in shapes.MIXING],
        _faster("official"),
        2.0,
    ),
    Goal(
        "a fifth of the experts trains: share of the time saved",
        [f"bench_partly_trained[{name}]" for name in shapes.FINE],
        _saved,
        0.20,
    ),
    Goal(
        "6 of 64 experts train: share of the time saved",
        ["bench_selected_experts[DeepSeek-V2-Lite]"],
        _saved,
        0.20,
    ),
    Goal(
        "6 of 64 experts train: memory of their gradients, relative to all",
        ["bench_selected_experts[DeepSeek-V2-Lite]"],
        _gradients,
        most=0.10,
    ),
    Goal(
        "UltraFuser's loss, 3 x Llama-2-13B, speedup over the naive loss",
        [
            f"bench_fused_loss[3xLlama-2-13B-{T}-{train}]"
            for T in (2048, 8192)
            for train in ("all", "gate")
        ],
        _times(NAIVE, "moe_runtime triton"),
        1.0,
    ),
    Goal(
        "LoRA on expert stacks, r = 16, T = 4096, forward + backward, ms",
        ["bench_adapters[Qwen3-30B-A3B-4096]"],
        lambda rows: rows["moe_runtime"]["ms"],
        most=1.3,
    ),
    Goal(
        "Qwen3-30B-A3B, NF4, LoRA r = 16, T = 1024: peak of a step, GB",
        QLORA,
        lambda rows: rows["moe_runtime"]["total MiB"] * 2**20 / 1e9,
        most=22.0,
    ),
    Goal("its peak, relative to the estimate of moe-runtime memory", QLORA, _estimated, most=1.05),
    Goal(
        "dispatch in CUDA C++, speedup over Triton's, T <= 2048",
        [
            f"bench_cuda_kernel[{name}-dispatch]"
            for name, shape in shapes.plans().items()
            if shape.T <= 2048
        ],
        than_triton,
        1.0,
    ),
)


def _of_transformers(rows):
    """Time as a multiple of that of the fastest of transformers' implementations."""
    theirs = [row["ms"] for name, row in rows.items() if name.startswith("transformers")]
    if not theirs:
        raise KeyError("transformers")
    return rows["moe_runtime"]["ms"] / min(theirs)


# times faster than PEFT, share of its memory
ADAPTERS = {
    "coarse": (1.8, 0.5),
    "fine": (2.2, 0.36),
    "E=128": (3.0, 0.1),
}
LAYERS = {  # least share of the ceiling, for each pass
    ("coarse", "fp32"): (0.92, 0.86),
    ("coarse", "bf16"): (0.88, 0.84),
    ("fine", "fp32"): (0.86, 0.78),
    ("fine", "bf16"): (0.82, 0.75),
}
CPU_LAYERS = [
    Goal(
        f"{shape} layer, {dtype}, {what}, share of the nearer ceiling",
        [f"{name}[{shape}-{dtype}]"],
        _share,
        least,
    )
    for (shape, dtype), leasts in LAYERS.items()
    for (name, what), least in zip(PASSES.items(), leasts)
]
PARTLY = "bench_partly_trained{}[fine]"
DECODE = [f"{shape}-{T}" for shape in shapes.CPU for T in shapes.DECODE if T <= 64]
CPU_GOALS = (
    *CPU_LAYERS,
    Goal(
        "decode, T <= 64, relative to the fastest of transformers: never slower",
        [f"bench_tokens[{name}-{dtype}]" for name in DECODE for dtype in ("fp32", "bf16")],
        _of_transformers,
        most=1.0,
    ),
    Goal(
        "XFT's merge stage, a step, relative to a dense tuning step",
        ["bench_mixing_step[small]"],
        _times("moe_runtime", "dense SFT step (floor)"),
        most=1.25,
    ),
    Goal(
        "a fifth of the experts trains: backward, relative to training all",
        [PARTLY.format("_backward")],
        _of_all,
        most=0.85,
    ),
    Goal(
        "a fifth of the experts trains: forward + backward, and a step with AdamW, relative to "
        "training all",
        [PARTLY.format(""), PARTLY.format("_step")],
        _of_all,
        most=0.95,
    ),
    Goal(
        "UltraFuser's loss, forward + backward, relative to the naive loss",
        FUSED[:1],
        _times("moe_runtime torch", NAIVE),
        most=1.0,
    ),
    Goal(
        "its stage 1, relative to the naive loss",
        FUSED[1:],
        _times("moe_runtime torch", NAIVE),
        most=0.6,
    ),
    Goal(
        "its peak memory, relative to the naive loss",
        FUSED,
        _times("moe_runtime torch", NAIVE, "peak MiB"),
        most=0.35,
    ),
    *(
        goal
        for shape, (speed, memory) in ADAPTERS.items()
        for names, what in [
            ([f"bench_adapters[{shape}]"], f"LoRA on expert stacks, {shape}, forward + backward")
        ]
        for goal in (
            Goal(
                f"{what}, NF4, relative to unpacked stacks",
                names,
                _times(NF4, "moe_runtime"),
                most=1.6,
            ),
            Goal(
                f"{what}, speedup over PEFT's own code",
                names,
                _faster(PEFT),
                speed,
            ),
            Goal(
                f"{what}, peak memory, relative to PEFT's own code",
                names,
                _times("moe_runtime", PEFT, "peak MiB"),
                most=memory,
            ),
        )
    ),
    Goal(
        "LoRA experts on one base, forward + backward, speedup over one product per slot",
        ["bench_lora_experts[coarse-both-fp32]"],
        _faster("LoRA per slot"),
        2.5,
    ),
)


def goals(rows: dict, wanted: Sequence[Goal] = GOALS) -> str:
    """Return one line per goal, and one per benchmark that misses it."""
    benches: dict[str, dict] = {}
    for (benchmark, variant), row in rows.items():
        benches.setdefault(benchmark, {})[variant] = row
    lines = []
    missed = []
    for goal in wanted:
        values = {}
        for name in goal.benchmarks:
            # not measured, or memory of 0
            with contextlib.suppress(KeyError, ZeroDivisionError):
                values[name] = goal.value(benches[name])
        worst = best = ""
        if values:
            worst, best = f"{min(values.values()):.2f}", f"{max(values.values()):.2f}"
        if goal.most is not None:
            worst, best = best, worst
        limit = goal.least if goal.most is None else goal.most
        met = 0
        for name, value in values.items():
            if goal.met(value):
                met += 1
            else:
                off = abs(value / limit - 1)
                missed.append(f"* {goal.what}: {name} is {value:.2f}, {off:.0%} off")
        left = len(goal.benchmarks) - len(values)
        cells = [
            goal.want(),
            worst,
            best,
            f"{met} of {len(values)}",
            str(left),
        ]
        lines.append([goal.what, *cells])
    heads = ["goal", "target", "worst", "best", "met", "not measured"]
    return "\n".join([markdown(heads, lines), "", *missed])
