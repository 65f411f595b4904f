"""kernels/merging.py natively: what the interpreter cannot show. Its twin without a GPU is tests/ops/test_merging.py."""

import pytest
import torch

from moe_runtime.ops.merging import merge_experts
from tests.hf.tiny import distance

pytestmark = pytest.mark.gpu


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    blocks = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del blocks


def run(weight, alpha, dout, backend):
    alpha = alpha.clone().requires_grad_()
    out = merge_experts(weight, alpha, backend=backend)
    return out.detach(), torch.autograd.grad(out, alpha, dout)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2048, 5504), (7, 33, 17), (1, 5), (3, 1), (4, 0)], ids=str)
def test_parity_with_float64_on_poisoned_memory(shape, dtype):
    weight = torch.randn(shape, device="cuda").to(dtype)
    alpha, dout = torch.rand(shape[0], device="cuda"), torch.randn(shape[1:], device="cuda").to(dtype)
    poison()
    out, dalpha = run(weight, alpha, dout, "triton")
    want = torch.einsum("e,e...->...", alpha.double(), weight.double())
    want_dalpha = (weight.double() * dout.double()).flatten(1).sum(1)
    if out.numel():
        assert distance(out, want) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert distance(dalpha, want_dalpha) < 1e-4
    else:
        assert not dalpha.any()


def test_twenty_runs_give_the_same_bits():
    weight = torch.randn(8, 1024, 1408, device="cuda", dtype=torch.bfloat16)
    alpha, dout = torch.rand(8, device="cuda"), torch.randn_like(weight[0])
    first = run(weight, alpha, dout, "triton")
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(weight, alpha, dout, "triton"), first))


def test_beyond_two_to_the_31_elements():
    weight = torch.ones(3, 1 << 30, device="cuda", dtype=torch.bfloat16)
    weight[2].fill_(2.0)
    alpha = torch.tensor([0.25, 0.25, 0.5], device="cuda")
    out, dalpha = run(weight, alpha, torch.ones_like(weight[0]), "triton")
    assert (out == 1.5).all()
    torch.testing.assert_close(dalpha, torch.tensor([1.0, 1.0, 2.0], device="cuda") * (1 << 30), rtol=1e-5, atol=0)


def test_cuda_graph():
    weight = torch.randn(4, 512, 512, device="cuda", dtype=torch.bfloat16)
    alpha, dout = torch.rand(4, device="cuda"), torch.randn_like(weight[0])
    run(weight, alpha, dout, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(weight, alpha, dout, "triton")
    alpha.copy_(torch.rand(4, device="cuda"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(weight, alpha, dout, "triton")))


def test_triton_is_what_a_gpu_gets():
    from moe_runtime import backends

    assert backends.pick("merge_experts", torch.empty(0, device="cuda")) == "triton"


def test_layer_equals_the_cpu():
    from moe_runtime import MoE, MoEConfig

    layer = MoE(MoEConfig(hidden_size=64, intermediate_size=96))
    x = torch.randn(3, 17, 64)
    want = layer(x)
    assert distance(layer.cuda()(x.cuda()).cpu(), want) < 1e-5
