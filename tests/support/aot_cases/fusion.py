"""Launches of kernels/fusion.py: three Llama-2-13B, more specialists, odd and small sizes."""

import torch

from moe_runtime.kernels import fusion
from tests.support.aot import CAPABILITIES, CORES, Case, cases_of, meta

T = 2048
V = 32000
H = 5120
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
# 8 bytes are one register that ptxas spills to fit one more block per processor: Triton version ->
# bytes
SPILLS = {(100, FP32, "ieee", False): {"3.6": 8, "3.7": 0, "3.9": 0}}


def _forward(
    capability: int, expect: bool, dtype=BF16, sizes=(H,) * 3, vocabulary=V, precision="ieee"
) -> Case:
    """The loss with the gate's gradient (`expect`), or with the mixed logits kept for the backward
    pass.
    """
    gate = meta(T, len(sizes), dtype=FP32)
    labels = meta(T, dtype=torch.int64)
    hidden = [meta(T, size, dtype=dtype) for size in sizes]
    heads = [meta(vocabulary, size, dtype=dtype) for size in sizes]
    config = fusion.fusion_config(capability, dtype, precision, sizes, expect)
    logits = None if expect else meta(T, vocabulary, dtype=FP32)
    args = (gate, labels, hidden, heads, vocabulary, -100, expect, logits, config)
    is_fast = dtype != FP32 and all(size % 16 == 0 for size in sizes)
    note = "gate's gradient" if expect else "logits kept"
    (case,) = cases_of(
        lambda: fusion._forward(*args),
        ("T",),
        capabilities=(capability,),
        expect=("cp.async", CORES[capability]) if is_fast else (),
        note=note + " tf32" * (precision == "tf32"),
        stack=SPILLS.get((capability, dtype, precision, expect), {}),
    )
    return case


def _backward(dtype=BF16, vocabulary=V, size=H) -> list[Case]:
    gate = meta(T, 3, dtype=FP32)
    labels = meta(T, dtype=torch.int64)
    hidden = [meta(T, size, dtype=dtype)] * 3
    heads = [meta(vocabulary, size, dtype=dtype)] * 3
    x = hidden[0]
    column = gate[:, 1]

    def step():
        fusion.fused_logits_backward(
            gate,
            labels,
            gate[:, 0],
            hidden,
            heads,
            vocabulary,
            -100,
        )
        fusion.fused_hidden_backward(x, x, column, column, x, x)
        fusion.fused_hidden_backward(x, x, column, column, None, x)

    wide = ("wide",) * (size % 16 == 0 == vocabulary % 16)
    values = []
    for case in cases_of(step, ("T",), expect=wide):
        if "fwd" not in case.kernel:
            values.append(case)
    return values


def _cases():
    for expect in (True, False):
        for capability in CAPABILITIES:
            yield _forward(capability, expect)._replace(listed=True)
        for capability in (80, 90, 100):
            yield _forward(capability, expect, sizes=(4097, 4096))
            for precision in ("ieee", "tf32"):
                yield _forward(capability, expect, FP32, precision=precision)
    for capability in (80, 90, 100):
        for S in (2, 4, 8, 16):
            yield _forward(capability, True, sizes=(4096,) * S)
    yield _forward(
        90,
        True,
        FP16,
        vocabulary=151936,
        sizes=(2048, 4096, 5120),
    )


CASES = [
    *_cases(),
    *_backward(),
    *_backward(FP32),
    *_backward(vocabulary=32001, size=4097),
]
