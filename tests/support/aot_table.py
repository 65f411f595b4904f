"""docs/kernels.md: what every kernel compiles to on every GPU.

python -m tests.support.aot_table                   # rewrites it
python -m tests.support.aot_table route 'dz.*bias'  # prints the cases whose kernel and note match
                                                    one of these patterns
python -m tests.support.aot_table --loops           # prints the main loops of the grouped products
                                                    on sm_90
"""

import importlib.metadata
import re
import sys

from moe_runtime.io.files import read_json
from tests.support.aot import (
    AMD,
    ROOT,
    Case,
    Report,
    all_cases,
    compile_all,
    complaints,
    jobs,
    main_loop,
)

PATH = ROOT / "docs" / "kernels.md"
EXECUTED = ROOT / "tests" / "emulator" / "executed.json"  # Triton's version -> GPU -> kernels
GPUS = {
    80: "sm_80: A100",
    86: "sm_86: A40, RTX 30",
    89: "sm_89: L40S, RTX 40",
    90: "sm_90: H100, H200",
    100: "sm_100: B200",
    120: "sm_120: RTX 50",
    AMD: f"{AMD}: MI300",
}
WHAT = {
    "combine._combine_fwd_kernel": "weighted sum of each token's rows",
    "combine._combine_bwd_kernel": "its gradient: rows and weights",
    "combine._sum_rows_kernel": (
        "plain sum of each token's rows, and of the weights' partial gradients"
    ),
    "combine._sum_rows_router_kernel": "the sum of rows with the router's part of the gradient",
    "decode._plan_kernel": "few slots: routing, sort and tiles in one launch",
    "decode._down_combine_kernel": (
        "few rows: down projection and each token's weighted sum in one launch"
    ),
    "dispatch._dispatch_fwd_count_kernel": (
        "stable counting sort of slots by expert: how many in each block of slots"
    ),
    "dispatch._dispatch_fwd_scan_kernel": "where each block's slots of an expert begin",
    "dispatch._dispatch_fwd_scatter_kernel": "each slot to its row, each row to its slot and token",
    "dispatch._invert_kernel": "the inverse of a permutation",
    "dispatch._tile_map_kernel": "the grouped GEMMs' tiles: expert, first row, end",
    "fusion._fused_logits_fwd_kernel": (
        "specialists' mixed logits, a tile at a time: the softmax's sums in the epilogue"
    ),
    "fusion._fused_logits_bwd_kernel": "gradient of the mixed logits of a chunk of tokens",
    "fusion._fused_hidden_bwd_kernel": (
        "gradients of a specialist's states and weight from its product"
    ),
    "expansion._gram_kernel": "Gram matrix of several experts, each read once",
    "expansion._dare_merge_kernel": (
        "two parents' randomly thinned differences, summed onto their base"
    ),
    "lora._lora_fwd_kernel": "LoRA experts' mixed activation over one base",
    "lora._lora_fwd_low_kernel": "its products with the experts' own down projections",
    "lora_backward._lora_bwd_z_kernel": (
        "gradient of the base's pre-activation, summed over the experts"
    ),
    "lora_backward._lora_bwd_low_kernel": (
        "gradients of what has rank r, and of the experts' weights, summed over the columns"
    ),
    "lora_backward._lora_bwd_w_kernel": (
        "gradients of the experts' own matrices, summed over the tokens"
    ),
    "grouped_gemm._up_fwd_kernel": (
        "up projection: gathers tokens, activation in its epilogue, keeps the pre-activation z"
    ),
    "grouped_gemm._up_stream_kernel": (
        "the same on Hopper, a program's tiles as one loop: loads under the epilogue"
    ),
    "grouped_gemm._grouped_gemm_fwd_kernel": (
        "one product per expert over rows in order: down projection, and dx"
    ),
    "grouped_gemm._grouped_gemm_stream_kernel": (
        "the same on Hopper, a program's tiles as one loop: loads under the epilogue"
    ),
    "grouped_gemm_backward._dz_kernel": (
        "gradient of z: gathers dout, activation's gradient in its epilogue, weights' too"
    ),
    "grouped_gemm_backward._grouped_gemm_bwd_w_kernel": (
        "gradient of an expert's weight: dy^T x over its rows"
    ),
    "grouped_gemm_backward._bias_bwd_kernel": (
        "gradient of the biases: sums over each expert's rows"
    ),
    "merging._merge_experts_fwd_kernel": "weighted sum of experts' weights, each read once",
    "merging._merge_experts_bwd_alpha_kernel": "gradient of the mixing coefficients",
    "merging._merged_linear_bwd_alpha_kernel": (
        "the same without the merged weight's gradient in memory"
    ),
    "routing._route_fwd_kernel": "router logits to K experts and their weights",
    "routing._route_bwd_kernel": "gradient of the logits",
    "shared_expert._shared_activation_fwd_kernel": (
        "activation of the shared expert, whose products are the library's"
    ),
    "shared_expert._shared_dz_kernel": "its gradient, and its weight's",
}
HEAD = """# Kernels

This page lists what every Triton kernel compiles to on each GPU that it supports. To measure
launch configs on your own GPU:

```bash
moe-runtime tune --shape olmoe
```

Written by `python -m tests.support.aot_table` with Triton {version}; `tests/kernels/test_aot.py`
fails if it is out of date.

The kernels were compiled on a machine without a GPU: the tables show that nothing spills, that
tensor cores, TMA and cp.async are in use, and how much of a processor one block occupies, **not
speed**.

`executed`: on these GPUs' code the kernel was executed instruction by instruction, on an emulator
of PTX ([tests/emulator](limits.md#what-was-verified-where)), and gave what its equation gives. That
is neither ptxas' code nor a GPU.

| kernel | purpose | executed |
|---|---|---|
{what}

The tables below have one line for each launch config of `kernels/tiles.py` and one for each other
kernel, in bfloat16 unless stated otherwise. A tile is BLOCK_M x BLOCK_N x BLOCK_K; for `up` it
has BLOCK_N columns of gate and as many of up. Registers are per thread, shared memory per block.
`rows an expert` is the mean number of rows per expert from which the config is used.
GPT-OSS-20B's lines are the same configs for its experts: interleaved and clamped gate and up,
biases, weights stored in x out.
"""
COLUMNS = (
    "| kernel | case | tile | warps | stages | registers | shared KiB | tensor cores | loads |"
)
AMD_HEAD = f"""
## {GPUS[AMD]}

Compiled, not run: these kernels have not run on such a GPU, and their configs are those of sm_80.
Configs that exceed {AMD}'s 64 KiB of shared memory or spill are listed as they are.

| kernel | case | tile | warps | stages | registers | shared KiB | tensor cores | scratch bytes |
|---|---|---|---|---|---|---|---|---|
"""


def plan(case: Case) -> list[str]:
    """Return the columns that need no compiler."""
    return [
        case.kernel,
        case.note or "-",
        case.title() or "-",
        str(case.num_warps),
        str(case.num_stages),
    ]


def row(case: Case, target: int | str, report: Report) -> str:
    """Return a line of the table."""
    if report.error:
        return f"| {' | '.join(plan(case))} | does not compile ||||"
    tensor = []
    for name in ("tcgen05", "wgmma", "mma.sync", "mfma"):
        if name in report.features:
            tensor.append(name)
    loads = [
        word
        for name, word in (("tma", "TMA"), ("cp.async", "cp.async"), ("wide", "16 bytes"))
        if name in report.features
    ]
    last = str(report.stack) if target == AMD else ", ".join(loads) or "-"
    facts = [
        str(report.registers),
        f"{report.shared / 1024:.1f}",
        ", ".join(tensor) or "-",
        last,
    ]
    return f"| {' | '.join(plan(case) + facts)} |"


def listed(cases: list[Case]) -> list[tuple[int, int | str]]:
    """Return the jobs that have a line."""
    values = []
    for i, target in jobs(cases):
        if cases[i].listed or target == AMD:
            values.append((i, target))
    return values


def executed(kernel: str) -> str:
    """Return the GPUs whose code of a kernel tests/emulator has executed."""
    archs = set()
    for kernels_of in read_json(EXECUTED).values():
        archs.update(int(arch) for arch, names in kernels_of.items() if kernel in names)
    return "sm_" + ", ".join(map(str, sorted(archs))) if archs else "-"


def render(cases: list[Case], reports: dict[tuple[int, int | str], Report]) -> str:
    """Return the whole file, from the reports of `listed(cases)`."""
    what = "\n".join(
        f"| `{name}` | {text} | {executed(name)} |" for name, text in sorted(WHAT.items())
    )
    text = HEAD.format(
        version=importlib.metadata.version("triton"),
        what=what,
    )
    for target, gpu in GPUS.items():
        text += AMD_HEAD if target == AMD else f"\n## {gpu}\n\n{COLUMNS}\n|{'---|' * 9}\n"
        rows = []
        for i, t in listed(cases):
            if t == target:
                rows.append(row(cases[i], t, reports[i, t]))
        text += (
            "\n".join(
                sorted(
                    rows,
                    key=lambda line: line.split("|")[1],
                )
            )
            + "\n"
        )
    return text


def read(text: str) -> tuple[str, dict[str, list[list[str]]]]:
    """Read from the file the Triton version, and for each GPU the columns that need no compiler."""
    version = re.search(r"with Triton ([\d.]+);", text)[1]
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    rows = {}
    for gpu, part in sections.items():
        rows[gpu] = [line.split(" | ") for line in part.split("\n") if " | " in line][1:]
    return version, {
        gpu: [[cell.strip("| ") for cell in line[:5]] for line in lines]
        for gpu, lines in rows.items()
    }


def main(words: list[str]) -> None:
    cases = all_cases()
    if words == ["--loops"]:
        for case in cases:
            wanted = (
                "grouped_gemm" in case.kernel and "wgmma" in case.expect and 90 in case.capabilities
            )
            if wanted and case.constant("BLOCK_M") == 128:
                print(
                    f"{case.kernel} {case.note} {case.title()}: {main_loop(case)}",
                    flush=True,
                )
        return
    work = listed(cases)
    if words:
        work = [
            (i, t)
            for i, t in jobs(cases)
            if any(
                re.search(
                    w,
                    f"{cases[i].kernel} {cases[i].note}",
                )
                for w in words
            )
        ]
    reports = dict(
        zip(
            work,
            compile_all([(cases[i], target) for i, target in work]),
        )
    )
    for (i, target), report in reports.items():
        bad = "; ".join(complaints(cases[i], target, report))
        if words or bad:
            print(
                GPUS[target].split(":")[0],
                row(cases[i], target, report),
                bad,
            )
    if not words:
        PATH.write_text(render(cases, reports))


if __name__ == "__main__":
    main(sys.argv[1:])
