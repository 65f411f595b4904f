"""Axes of PEFT's LoRA on a stack of experts, by the PEFT version that wrote the file.

    current     lora_A.weight [E r, in], lora_B.weight [out, r E];    delta_e = s B_e A_e
    reversed    lora_A.weight [E r, out], lora_B.weight [in, r E];    delta_e = s A_e^T B_e^T

Row e r + j of lora_A.weight and column j E + e of lora_B.weight belong to expert e.

| written by | stacks [E, out, in] | stacks [E, in, out] |
|---|---|---|
| PEFT before 0.19 | reversed | current |
| 0.19 | reversed | reversed |
| 0.20 and later | current | current |

`peft_version` in adapter_config.json names the version from 0.18 on. PEFT 0.20 and later ignores
it: it rejects a reversed pair if the shapes differ, and misreads that of a square stack, which adds
the transposed change.
"""

from packaging.version import InvalidVersion, Version
from torch import Tensor, nn


def is_reversed(version: str | None, transposed: bool) -> bool | None:
    """Return whether this PEFT version writes reversed pairs for stacks of this layout; None if
    unknown.
    """
    try:
        written_by = Version((version or "").partition("@")[0])
    except InvalidVersion:
        return None
    if written_by.is_prerelease and written_by.release[:2] in ((0, 19), (0, 20)):
        return None  # built while the axes changed
    return written_by < Version("0.20") and (not transposed or written_by >= Version("0.19"))


def unpack(a: Tensor, b: Tensor, num_experts: int, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return views of a file's pair by expert, A [E, r, in] and B [E, out, r]; `reverse` for a
    reversed pair.
    """
    a = a.view(num_experts, -1, a.shape[1])
    b = b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)
    return (b.transpose(1, 2), a.transpose(1, 2)) if reverse else (a, b)


def pack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return lora_A.weight [E r, in] and lora_B.weight [out, r E] of A [E, r, in] and B [E, out,
    r], as PEFT writes them.
    """
    a = a.reshape(-1, a.shape[2])
    b = b.permute(1, 2, 0).reshape(b.shape[1], -1)
    return a.contiguous(), b.contiguous()


def transposed_stack(wrappers: dict[str, nn.Module], adapter: str, version: str) -> str | None:
    """Return a square stack whose reversed pair PEFT would have misread from a file of this
    version; `wrappers` are PEFT's, by path.
    """
    for name, wrapper in wrappers.items():
        if wrapper.num_experts > 1 and adapter in wrapper.lora_A:
            is_square = wrapper.lora_A[adapter].in_features == wrapper.lora_B[adapter].out_features
            if is_square and is_reversed(
                version, getattr(wrapper.get_base_layer(), "is_transposed", False)
            ):
                return f"{wrapper.parameter_name} of {name}"
    return None
