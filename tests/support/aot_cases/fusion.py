"""Launches of kernels/fusion.py: three Llama-2-13B, more specialists, odd and small sizes."""

import torch

from moe_runtime.kernels import fusion
from tests.support.aot import CAPABILITIES, Case, record

T = 2048
V = 32000
H = 5120
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
# 8 bytes are one register that ptxas keeps elsewhere for the sake of one more block per processor:
# Triton -> bytes
SPILLS = {(100, FP32, "ieee", False): {"3.6": 8, "3.7": 0, "3.9": 0}}
CORES = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma",
    100: "tcgen05",
    120: "mma.sync",
}


def meta(*shape: int, dtype=FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(
    capability: int, expect: bool, dtype=BF16, sizes=(H,) * 3, vocabulary=V, precision="ieee"
) -> Case:
    """The loss with the gate's gradient (`expect`), or with the mixed logits kept for the backward
    pass.
    """
    gate = meta(T, len(sizes))
    labels = meta(T, dtype=torch.int64)
    hidden, heads = ([meta(n, h, dtype=dtype) for h in sizes] for n in (T, vocabulary))
    config = fusion.fusion_config(capability, dtype, precision, sizes, expect)
    logits = None if expect else meta(T, vocabulary)
    (case,) = record(
        lambda: fusion._forward(
            gate, labels, hidden, heads, vocabulary, -100, expect, logits, config
        )
    )
    fast = dtype != FP32 and all(size % 16 == 0 for size in sizes)
    copies = ("cp.async", CORES[capability]) if fast else ()
    note = "gate's gradient" if expect else "logits kept"
    note += " tf32" * (precision == "tf32")
    signature = case.signature | {"T": "i32"}
    stack = SPILLS.get((capability, dtype, precision, expect), {})
    return case._replace(
        signature=signature, capabilities=(capability,), expect=copies, note=note, stack=stack
    )


def _backward(dtype=BF16, vocabulary=V, size=H) -> list[Case]:
    gate = meta(T, 3)
    labels = meta(T, dtype=torch.int64)
    hidden, heads = ([meta(n, size, dtype=dtype)] * 3 for n in (T, vocabulary))
    x = meta(T, size, dtype=dtype)
    column = gate[:, 1]
    found = record(
        lambda: (
            fusion.fused_logits_backward(gate, labels, gate[:, 0], hidden, heads, vocabulary, -100),
            fusion.fused_hidden_backward(x, x, column, column, x, x),
            fusion.fused_hidden_backward(x, x, column, column, None, x),
        )
    )
    found = [case for case in found if "fwd" not in case.kernel]
    wide = ("wide",) * (size % 16 == 0 == vocabulary % 16)
    return [
        case._replace(
            signature=case.signature | {"T": "i32"} if "T" in case.signature else case.signature,
            expect=wide,
        )
        for case in found
    ]


CASES = [
    *(
        _forward(capability, expect)._replace(listed=True)
        for capability in CAPABILITIES
        for expect in (True, False)
    ),
    *(
        _forward(capability, True, sizes=(4096,) * S)
        for capability in (80, 90, 100)
        for S in (2, 4, 8, 16)
    ),
    *(
        _forward(capability, expect, sizes=(4097, 4096))
        for capability in (80, 90, 100)
        for expect in (True, False)
    ),
    *(
        _forward(capability, expect, FP32, precision=precision)
        for capability in (80, 90, 100)
        for expect in (True, False)
        for precision in ("ieee", "tf32")
    ),
    _forward(90, True, FP16, vocabulary=151936, sizes=(2048, 4096, 5120)),
    *_backward(),
    *_backward(FP32),
    *_backward(vocabulary=32001, size=4097),
]
