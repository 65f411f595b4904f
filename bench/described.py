"""Descriptions of benchmarks: kind, shape, dtype, and rows as text."""

from collections.abc import Iterable

import torch

from moe_runtime.bench import shapes
from moe_runtime.bench.machine import CUDA

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
KINDS = ("op", "layer", "step", "tokens", "memory", "breakdown", "method")  # a bench file's KIND


def dtype_of(request, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a benchmark: `dtype`, its parameter, or the device's default."""
    usual = torch.bfloat16 if CUDA else torch.float32
    return dtype or _parameters(request).get("dtype", usual)


def fields(request, dtype: torch.dtype | None, flops: float, bytes: float, tokens: int) -> dict:
    """Return the fields of extra_info that describe a benchmark."""
    known = {
        "kind": getattr(request.module, "KIND", "op"),
        "shape": shape_of(request),
        "dtype": DTYPES[dtype_of(request, dtype)],
        "flops": flops,
        "bytes": bytes,
        "tokens": tokens,
    }
    return {name: value for name, value in known.items() if value}


def shape_of(request) -> dict | None:
    """Return name, without tokens, and fields of the shape that is a benchmark's parameter."""
    shape = next(
        (value for value in _parameters(request).values() if hasattr(value, "_asdict")), None
    )
    if shape is None:
        return None
    name = ""
    whole = request.node.callspec.id
    for table in (*vars(shapes).values(), *vars(request.module).values()):
        if isinstance(table, dict):
            for key, value in table.items():
                if isinstance(key, str) and value == shape and key in whole:
                    name = max(name, key, key=len)
    fields = getattr(shape, "shape", shape)._asdict()  # of a layer with a dtype, those of the layer
    return {
        "name": (name or whole).removesuffix(f"-{fields.get('T')}"),
        **fields,
    }


def _parameters(request) -> dict:
    callspec = getattr(request.node, "callspec", None)
    return callspec.params if callspec else {}


RATES = {"TFLOP/s": "{:9.3f}", "GB/s": "{:9.3f}", "tokens/s": "{:11,.0f}"}


def line(row: dict, floor: str) -> str:
    """Return a variant's row as a line for a terminal."""
    text = f"{row['ms']:10.2f} ms{row['ratio']:8.3f} x {floor}"
    for unit, form in RATES.items():
        if unit in row:
            text += f"{form.format(row[unit])} {unit}"
    text += f"   spread {row['spread']:.0%}"
    if "share" in row:
        text += f"   {row['share']:.0%} of the ceiling"
    if "peak MiB" in row:
        text += f"   peak {row['peak MiB']:,.0f} MiB"
    return text


def cell(row: dict) -> str:
    """Return a variant's row as a table cell, without the time if memory was counted."""
    if "saved KiB/token" in row:
        text = f"{row['saved KiB/token']:,.1f}"
        if "formula KiB/token" in row:
            text += f" of {row['formula KiB/token']:,.1f}"
        return f"{text} KiB per token saved"
    parts = [f"{row['ms']:.3f} ms"]
    if "tokens/s" in row:
        parts.append(f"{row['tokens/s']:,.0f} tokens/s")
    if "share" in row:
        parts.append(f"{row['share']:.0%}")
    if "peak MiB" in row:
        parts.append(f"{row['peak MiB']:.0f} MiB")
    # results of two correct implementations differ by their rounding
    off = row.get("difference", 0.0)
    if off is None:
        parts.append("contains NaN or infinity")
    elif off >= 0.05:
        parts.append(f"differs by {off:.0e}")
    return ", ".join(parts)


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return text.replace("| --- ", "|---").replace("--- |", "---|")
