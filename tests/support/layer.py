"""Layers with the arguments of the oracles, and the dense MLP that equals an expert."""

from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.tools.conformance import oracle


def moe_layer(**options):
    """Return a layer for `oracle.run` and `oracle.moe_mismatches`."""

    def call(x, up, down, topk_weight, topk_idx, *, up_bias, down_bias, act, gated, **form):
        return moe_mlp(
            x,
            up,
            down,
            topk_weight,
            topk_idx,
            act=act,
            gated=gated,
            **form,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            **options,
        )

    return call


def dense_mlp(layer, weights, x):
    """Compute one dense MLP in float64; `weights` uses the names of the stacks of
    `layer.experts`.
    """
    up = layer.experts.up_name
    biases = [weights.get(f"{up}_bias"), weights.get("down_proj_bias")]
    config = layer.config
    return oracle.mlp(
        x.double(),
        weights[up],
        weights["down_proj"],
        *biases,
        act=config.hidden_act,
        gated=config.gated,
    )
