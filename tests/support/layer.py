"""`moe_mlp` with the arguments of the oracles."""

from moe_runtime.ops.moe_mlp import moe_mlp


def moe_layer(**options):
    """A layer for `oracle.run` and `oracle.moe_mismatches`."""

    def call(x, up, down, topk_weight, topk_idx, *, up_bias, down_bias, act, gated, **form):
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        return moe_mlp(
            x, up, down, topk_weight, topk_idx, act=act, gated=gated, **form, **biases, **options
        )

    return call
