"""Exported graphs: for torch they contain our ops and nothing specific to this machine, for other
runtimes none of our ops.
"""

import os
import sys

import pytest
import torch
from torch import nn
from transformers.exporters.utils import apply_patches

import moe_runtime
from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.modules.lora import LoRAMoE
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import MoE
from moe_runtime.modules.trainable import split_rows
from moe_runtime.native.library import cpp
from tests.support import cpu_build, stock_moe
from tests.support.captured import captured

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_experts": 4,
    "top_k": 2,
}


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(16, 12)
        self.up_proj = nn.Linear(16, 12)
        self.down_proj = nn.Linear(12, 16)


def split():
    layer = MoE(MoEConfig(**SIZES))
    split_rows(layer.experts, layer.experts.stacks(), [2, 0])
    return layer


LAYERS = {
    "one op": lambda: MoE(MoEConfig(**SIZES, gate="softmax_topk_renorm")),
    "two ops": lambda: MoE(MoEConfig(**SIZES, router="mlp", bias=True)),
    "rows that train": split,
    "merged": lambda: MergedMLP(MoEConfig(**SIZES)),
    "lora": lambda: LoRAMoE(
        Dense(),
        MoEConfig(**SIZES, gate="softmax_topk"),
        rank=3,
    ),
}


def drawn(name: str) -> nn.Module:
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def export(layer, strict=False):
    return torch.export.export(
        layer, (torch.randn(6, 16),), dynamic_shapes=({0: torch.export.Dim("T")},), strict=strict
    )


def ours(program) -> list:
    values = []
    for node in program.graph.nodes:
        if "moe_runtime" in str(node.target):
            values.append(node)
    return values


@pytest.mark.parametrize(
    "strict",
    [
        False,
        pytest.param(True, marks=pytest.mark.slow),
    ],
    ids=["not strict", "strict"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_graph_is_machine_independent(name, strict):
    layer = drawn(name)
    program = export(layer, strict)
    assert ours(program)
    for node in ours(program):
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args)) | node.kwargs
        assert given["backend"] == "auto", node
        assert not given.get("save"), node

    assert "promote_types" not in str(program.graph)
    x = torch.randn(9, 16, requires_grad=True)
    expected = layer(x)
    out = program.module()(x)
    torch.testing.assert_close(out, expected)
    # the backward recomputes the pre-activation, which is not saved
    weights = torch.randn_like(out)
    grads = [torch.autograd.grad(y, x, weights)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_a_compiled_graph_uses_this_machines_backend():
    seen = []

    def backend(graph, _):
        seen.extend(node.args[-2:] for node in graph.graph.nodes if "moe_layer" in str(node.target))
        return graph

    layer = LAYERS["one op"]()
    x = torch.randn(6, 16)
    torch.compile(layer, fullgraph=True, backend=backend)(x)

    assert seen == [(True, backends.choose("moe_mlp", x))]


CHILD = """
import sys, torch
from pathlib import Path
from moe_runtime.native.library import cpp
from moe_runtime.ops import moe_layer, moe_mlp_cpp
calls, run = [], moe_mlp_cpp.forward
moe_mlp_cpp.forward = lambda *a: calls.append(1) or run(*a)
folder, built = sys.argv[1:]
x = torch.load(f"{folder}/x.pt")
cpp.use("the CPU library is not built")
there, kept = torch.export.load(f"{folder}/there.pt2").module()(x), len(calls)
cpp.use(cpp.bind(Path(built)))
torch.save((there, kept, torch.export.load(f"{folder}/nowhere.pt2").module()(x), len(calls)), f"{folder}/out.pt")
"""  # noqa: E501


@pytest.mark.slow
def test_a_program_moves_between_machines_with_and_without_the_cpu_library(tmp_path, monkeypatch):
    """A graph with the backend of the exporting machine would raise a ValueError where the library
    is not built.
    """
    library = cpu_build.library()
    layer = LAYERS["one op"]()
    x = torch.randn(9, 16)
    monkeypatch.delenv("MOE_RUNTIME_BACKEND", raising=False)
    missing = "the CPU library is not built"
    for name, state, backend in (("there", library, "cpp"), ("nowhere", missing, "torch")):
        monkeypatch.setattr(cpp, "_found", state)
        assert backends.choose("moe_mlp", x) == backend
        torch.export.save(export(layer), tmp_path / f"{name}.pt2")
    torch.save(x, tmp_path / "x.pt")
    for name in list(os.environ):
        if name.startswith(("TRITON", "MOE_", "PYTEST")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = captured(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            CHILD,
            str(tmp_path),
            str(library.path),
        ]
    )

    assert done.returncode == 0, done.stderr[-2000:]
    there, calls_without, nowhere, calls = torch.load(tmp_path / "out.pt")
    assert (calls_without, calls) == (0, 1)
    torch.testing.assert_close(there, layer(x))
    torch.testing.assert_close(nowhere, layer(x))


def stock():
    model = stock_moe.stock(
        "mixtral",
        num_hidden_layers=1,
        use_cache=False,
    ).eval()
    moe_runtime.patch(model)
    return model


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("one op", "two ops", "merged")]


@pytest.mark.parametrize("name", ["rows that train", "lora", *SLOW])
def test_graphs_for_other_runtimes_hold_no_op_of_ours(name):
    layer = drawn(name)
    moe_runtime.register()
    with apply_patches("onnx"):
        program = export(layer)

    assert not ours(program)
    assert backends.portable() is None
    lowered = program.run_decompositions()
    for node in lowered.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace == "aten"
    x = torch.randn(9, 16)
    expected = layer(x)
    for one in (program, lowered):
        torch.testing.assert_close(one.module()(x), expected)


@pytest.mark.parametrize("target", ["onnx", "executorch", "openvino"])
def test_models_for_other_runtimes_hold_no_op_of_ours(target):
    model = stock()
    ids = torch.randint(0, 64, (1, 6))
    wanted = model(input_ids=ids).logits
    with torch.no_grad():
        held = ours(torch.export.export(Logits(model), (ids,)))
        with apply_patches(target):
            program = torch.export.export(Logits(model), (ids,))

    assert held
    assert not ours(program)
    torch.testing.assert_close(
        program.module()(ids),
        wanted,
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(
        model(input_ids=ids).logits,
        wanted,
    )  # everything is restored
