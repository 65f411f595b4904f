"""Differences between merging in the CPU library and torch's bits, or between its gradient and
float64.
"""

import torch

from moe_runtime.ops.merging import merge_experts

# experts and elements: less than a vector, a vector and more, several blocks with a remainder; one
# group of experts and several
CASES = [
    (1, 7),
    (3, 64),
    (8, 4096),
    (9, 4097),
    (13, 130),
    (17, 2 * 4096 + 200),
    (33, 129),
]


def merge_mismatches(E: int, P: int, dtype: torch.dtype) -> list[str]:
    """Return the mismatches for `E` experts with `P` elements each, with weights and dout in the
    same dtype and in different ones.
    """
    weight = torch.randn(E, P).to(dtype)
    alpha = torch.randn(E, requires_grad=True)
    dout = torch.randn(P).to(dtype)
    out = merge_experts(weight, alpha, backend="cpp")
    case = f"{E} experts of {P} {dtype}"
    bad = []
    if not torch.equal(out, merge_experts(weight, alpha, backend="torch")):
        bad.append(f"merged: {case}")
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for upstream in (dout, dout.to(other)):
        got = torch.ops.moe_runtime.merge_experts_backward_alpha(
            upstream,
            weight,
            "cpp",
        )
        expected = weight.double() @ upstream.double()
        # relative to the sum of magnitudes: the rounding error that is allowed
        size = weight.double().abs() @ upstream.double().abs()
        if not ((got - expected).abs() <= 1e-6 * size).all():
            bad.append(f"dalpha: {case} from {upstream.dtype}")
    return bad
