"""kernels/merging.py natively, for what the interpreter cannot show. Without a GPU:
tests/ops/test_merging.py.
"""

import pytest
import torch

from moe_runtime import MoEConfig
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.merging import merge_experts, merged_linear
from tests.support.oracle import poison, relative_error

pytestmark = pytest.mark.gpu


def run(weight, alpha, dout, backend):
    alpha = alpha.clone().requires_grad_()
    out = merge_experts(weight, alpha, backend=backend)
    return out.detach(), torch.autograd.grad(out, alpha, dout)[0]


def test_beyond_two_to_the_31_elements():
    weight = torch.ones(
        3,
        1 << 30,
        device="cuda",
        dtype=torch.bfloat16,
    )
    weight[2].fill_(2.0)
    alpha = torch.tensor([0.25, 0.25, 0.5], device="cuda")
    out, dalpha = run(
        weight,
        alpha,
        torch.ones_like(weight[0]),
        "triton",
    )
    assert (out == 1.5).all()
    torch.testing.assert_close(
        dalpha, torch.tensor([1.0, 1.0, 2.0], device="cuda") * (1 << 30), rtol=1e-5, atol=0
    )


def linear_sample(T, E, N, K, dtype, weight_dtype):
    x = torch.randn(T, K, device="cuda", dtype=dtype)
    weight = torch.randn(
        E,
        N,
        K,
        device="cuda",
        dtype=weight_dtype,
    )
    return (
        x,
        weight,
        torch.rand(E, device="cuda").softmax(-1),
        torch.randn(T, N, device="cuda", dtype=dtype),
    )


def linear_gradients(x, weight, alpha, dout):
    x = x.clone().requires_grad_()
    alpha = alpha.clone().requires_grad_()
    merged = merge_experts(weight, alpha.detach()).to(x.dtype)
    out = merged_linear(x, weight, alpha, merged, backend="triton")
    return out.detach(), *torch.autograd.grad(
        out,
        (x, alpha),
        dout,
    )


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "T, E, N, K",
    [
        (4096, 8, 2048, 5504),
        (2049, 3, 1408, 2048),
        (100, 8, 33, 17),
        (1, 1, 5, 3),
    ],
)
def test_linear_parity_with_float64(T, E, N, K, dtype, weight_dtype, tf32, monkeypatch):
    monkeypatch.setattr(
        torch.backends.cuda.matmul,
        "allow_tf32",
        tf32,
    )
    x, weight, alpha, dout = linear_sample(T, E, N, K, dtype, weight_dtype)
    poison()
    _, dx, dalpha = linear_gradients(x, weight, alpha, dout)
    dw = dout.double().t() @ x.double()
    expected = torch.stack([(dw * w.double()).sum() for w in weight])
    rough = dtype == torch.float32 and tf32
    # the sums of E N K terms cancel: the error is relative to the terms, not to the sum
    scale = dw.norm() * weight[0].double().norm()
    assert (dalpha.double() - expected).abs().max() < (1e-4 if rough else 1e-6) * scale
    merged = merge_experts(weight, alpha).to(dtype)
    assert relative_error(
        dx,
        dout.double() @ merged.double(),
    ) < {
        torch.bfloat16: 5e-3,
        torch.float16: 1e-3,
    }.get(dtype, 2e-3)


def test_linear_backward_has_no_weight_gradient_in_memory():
    x, weight, alpha, dout = linear_sample(64, 8, 2048, 5504, torch.bfloat16, torch.bfloat16)
    alpha.requires_grad_()
    out = merged_linear(
        x,
        weight,
        alpha,
        merge_experts(weight, alpha.detach()),
        backend="triton",
    )
    torch.autograd.grad(out, alpha, dout, retain_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, alpha, dout)
    assert torch.cuda.max_memory_allocated() - before < weight[0].numel() // 8


def test_linear_beyond_two_to_the_31_elements():
    x = torch.ones(2, 1 << 16, device="cuda", dtype=torch.bfloat16)
    dout = torch.ones_like(x)
    weight = torch.zeros(
        1,
        1 << 16,
        1 << 16,
        device="cuda",
        dtype=torch.bfloat16,
    )
    weight[0, -1] = 1
    alpha = torch.ones(1, device="cuda", requires_grad=True)
    out = merged_linear(
        x,
        weight,
        alpha,
        weight[0],
        backend="triton",
    )
    assert torch.autograd.grad(out, alpha, dout)[0].item() == 2 << 16


def layer_and_input(**kwargs):
    config = MoEConfig(
        hidden_size=256, intermediate_size=512, num_experts=8, initializer_range=0.1, **kwargs
    )
    return MergedMLP(config, dtype=torch.bfloat16, device="cuda"), torch.randn(
        64, 256, device="cuda", dtype=torch.bfloat16
    )


def merge_again(layer, x):
    layer.release()
    with torch.no_grad():
        return layer(x)


@pytest.mark.parametrize("fused", [False, True])
def test_layer_follows_its_optimizer_without_a_synchronization(fused):
    layer, x = layer_and_input(bias=True)
    optimizer = torch.optim.AdamW(
        [layer.mixing_logits],
        lr=0.3,
        fused=fused,
    )
    layer(x).square().sum().backward()  # compiles the kernels
    optimizer.step()
    found = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                layer(x).square().sum().backward()
            optimizer.step()
            found.append((layer(x).detach(), layer.mixing_logits.detach().clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, logits in found:
        with torch.no_grad():
            layer.mixing_logits.copy_(logits)
        assert torch.equal(merge_again(layer, x), out)


def test_layer_in_a_cuda_graph_merges_at_every_replay():
    layer, x = layer_and_input()
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for _ in range(2):
            layer.mixing_logits.data.normal_()
            graph.replay()
            assert torch.equal(out, merge_again(layer, x))


def test_layer_on_two_streams():
    layer, x = layer_and_input()
    expected = merge_again(layer, x)
    torch.cuda.synchronize()
    for _ in range(5):
        layer.release()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found = []
        for stream in streams:
            with torch.cuda.stream(stream), torch.no_grad():
                found.append(layer(x))
        torch.cuda.synchronize()
        for out in found:
            assert torch.equal(out, expected)
