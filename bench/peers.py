"""Other implementations of a layer's experts, used as documented by them; all are optional."""

import torch
import torch.nn.functional as F

from moe_runtime.bench.clock import one_line


def grouped_mm(layer):
    """torch's grouped_mm between a sort and a gather, without host synchronization."""
    T, H, _, E, K, _ = layer.shape
    device = layer.x.device
    experts, order = layer.topk_idx.flatten().sort(stable=True)
    ids = torch.arange(E, device=device)
    offsets = torch.searchsorted(experts, ids, right=True).to(torch.int32)
    z = F.grouped_mm(
        layer.x[order // K],
        layer.up.transpose(1, 2),
        offs=offsets,
    )
    gate, up = z.chunk(2, -1)
    y = F.grouped_mm(
        F.silu(gate) * up,
        layer.down.transpose(1, 2),
        offs=offsets,
    )
    back = torch.empty_like(order).scatter_(
        0,
        order,
        torch.arange(T * K, device=device),
    )
    weight = layer.topk_weight.to(y.dtype)
    return torch.bmm(weight[:, None], y[back].view(T, K, H))[:, 0]


def _scattermoe(layer):
    from scattermoe.mlp import GLUMLP

    _, H, I, E, K, _ = layer.shape
    with torch.device("meta"):
        experts = GLUMLP(H, I, E, K)
    # scattermoe has up first, then gate
    experts.experts.weight = torch.nn.Parameter(layer.up.detach().roll(I, 1))
    experts.output_experts.weight = layer.down
    weights = [experts.experts.weight, layer.down]

    def call():
        return experts(
            layer.x,
            layer.topk_weight.to(layer.x.dtype),
            layer.topk_idx,
        )

    return call, [layer.x, *weights, layer.topk_weight], layer.dout


def _liger(layer):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    idx = layer.topk_idx.to(torch.int32)
    return lambda: LigerFusedMoEFunction.apply(
        layer.x,
        layer.up,
        layer.down,
        idx,
        layer.topk_weight,
    )


def _sonicmoe(layer):
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    T, H, I, E, K, _ = layer.shape
    # sonicmoe has interleaved gate and up, and the expert last
    up = (
        layer.up.detach()
        .view(E, 2, I, H)
        .transpose(1, 2)
        .reshape(
            E,
            2 * I,
            H,
        )
    )
    up = torch.nn.Parameter(up).permute(1, 2, 0).detach().requires_grad_()
    down = layer.down.detach().permute(1, 2, 0).requires_grad_()
    token = torch.arange(
        T,
        device=layer.x.device,
        dtype=torch.int32,
    ).repeat_interleave(K)
    experts = layer.topk_idx.flatten().to(torch.int32)
    stream = torch.cuda.current_stream().cuda_stream

    def call():
        scores = layer.topk_weight.flatten().to(layer.x.dtype)
        inputs = (layer.x, scores, token, experts, up, None, down, None, E, stream)
        return moe_general_routing_inputs(*inputs, ActivationType.SWIGLU)[0]

    return call, [layer.x, up, down, layer.topk_weight], layer.dout


def _megablocks(layer):
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    _, H, I, E, K, _ = layer.shape
    args = Arguments(
        hidden_size=H,
        ffn_hidden_size=I,
        moe_num_experts=E,
        moe_top_k=K,
        mlp_type="glu",
        mlp_impl="grouped",
        activation_fn=F.silu,
        bias=False,
        return_bias=False,
        fp16=False,
        bf16=True,
        device=layer.x.device,
    )
    experts = ParallelDroplessMLP(args)
    # megablocks has [E * I, H] for gate, up and down each
    stacks = (*layer.up.detach().chunk(2, 1), layer.down.detach().transpose(1, 2))
    weights = []
    for stack in stacks:
        weights.append(torch.nn.Parameter(stack.reshape(E * I, H).contiguous()))
    experts.mlp.w1, experts.mlp.v1, experts.mlp.w2 = weights
    idx = layer.topk_idx.to(torch.int32)

    def call():
        return experts.forward_once(
            layer.x[None],
            layer.topk_weight.to(layer.x.dtype),
            idx,
        )[0].view_as(layer.x)

    return call, [layer.x, *weights, layer.topk_weight], layer.dout


PACKAGES = {
    "scattermoe": _scattermoe,
    "liger_kernel": _liger,
    "sonicmoe": _sonicmoe,
    "megablocks": _megablocks,
}


def installed(layer, notes: dict) -> dict:
    """Return variants of the packages that can be imported and run this layer; see
    `LayerVariants.gpu_variants`.
    """
    variants = {}
    for name, build in PACKAGES.items():
        try:
            variants[name] = build(layer)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            notes[name] = "not installed" if missing else one_line(error)
    return variants
