"""Where merging on the CPU library is not torch's to the last bit, or its gradient not
float64's.
"""

import torch

from moe_runtime.ops.merging import merge_experts

# experts and numbers: less than a vector, a vector and more, several blocks with a rest; one group
# of experts and several
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
    """Name what is wrong for `E` experts of `P` numbers; weights and dout in one dtype and
    in both.
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
        want = weight.double() @ upstream.double()
        # of the sum of magnitudes: what rounding may cost
        size = weight.double().abs() @ upstream.double().abs()
        if not ((got - want).abs() <= 1e-6 * size).all():
            bad.append(f"dalpha: {case} from {upstream.dtype}")
    return bad
