"""Only one file uses private torch names, and the library works without each of them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moe_runtime"
ATTRIBUTES = {"_schema", "_opname", "_op_dk", "_dynamo_marked_constant"}  # of torch's objects
ALLOWED = {
    "ops/_torch_private.py": {},
    # lower layers than ops; without the attribute a graph breaks there
    "backends.py": {"_dynamo_marked_constant"},
    "native/library.py": {"_dynamo_marked_constant"},
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_torch(tree: ast.Module) -> Iterator[str]:
    """Return every private torch name in a file."""
    torch_modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.startswith("torch.") and is_private(a.name)
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            torch_modules |= {a.asname or a.name for a in node.names if not a.name[0].isupper()}
            yield from (a.name for a in node.names if is_private(node.module) or is_private(a.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in ATTRIBUTES:
                yield node.attr
            elif name.split(".")[0] in torch_modules and is_private(node.attr):
                yield name


def test_one_file_names_private_torch():
    bad = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name == "ops/_torch_private.py" or name.startswith(("kernels/", "bench/")):
            continue
        names = set(private_torch(ast.parse(path.read_text()))) - set(ALLOWED.get(name, ()))
        bad += [f"{name}: {private}" for private in sorted(names)]
    assert bad == []


WITHOUT = {
    "autograd_kernel": "torch._functorch.autograd_function.enable_single_level_autograd_function",
    "in_dispatch_mode": "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    "in_transform": "torch._C._are_functorch_transforms_active",
    "graph_is_kept": "torch._C._autograd._get_current_graph_task_keep_graph",
    "disable_dynamo": "torch._disable_dynamo",
    "has_global_hooks": "torch.nn.modules.module._has_any_global_hook",
    "outside_of_modes": "torch.utils._python_dispatch._disable_current_modes",
}
RUN = """
import importlib, torch, torch._dynamo
owner, _, name = without.rpartition(".")
for last in range(1, owner.count(".") + 1):  # import the folders above, and the file if it is one
    folder = ".".join(owner.split(".")[: last + 1])
    if not folder.startswith("torch._C"):
        importlib.import_module(folder)
owner = eval(owner)
value = getattr(owner, name)
delattr(owner, name)
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.ops import _torch_private, all_to_all, merging, moe_mlp
from moe_runtime.ops.fusion import fused_cross_entropy
setattr(owner, name, value)  # torch needs it itself
from moe_runtime.hf.dropin import gates
lost = name in ("enable_single_level_autograd_function", "_are_functorch_transforms_active")
assert _torch_private.HAS_AUTOGRAD_KERNEL != lost
torch.manual_seed(0)

def check(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

up, down = torch.randn(4, 10, 8), torch.randn(4, 8, 5)
leaves = [t.requires_grad_() for t in (torch.randn(6, 8), up, down, torch.rand(6, 2))]
idx = torch.randint(0, 4, (6, 2))
outputs = [f(*leaves, idx) for f in (moe_mlp.moe_mlp, moe_mlp.moe_mlp_reference)]
grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outputs]
check(*outputs)
check(*grads)
compiled = torch.compile(moe_mlp.moe_mlp, fullgraph=True, backend="aot_eager")
check(torch.autograd.grad(compiled(*leaves, idx).square().sum(), leaves), grads[1])
alpha = torch.rand(4)
check(merging.merge_experts(up, alpha), torch.einsum("e...,e->...", up, alpha))
heads, gate = [torch.randn(11, 8, requires_grad=True)] * 2, torch.rand(6, 2)
labels = torch.randint(0, 11, (6,))
loss = fused_cross_entropy([leaves[0]] * 2, heads, gate, labels, reduction="sum")
first = torch.autograd.grad(loss, heads[0], retain_graph=True)
second = torch.autograd.grad(loss, heads[0])
check(first, second)
moe = MoE(MoEConfig(hidden_size=8, intermediate_size=5, num_experts=4, top_k=2))
moe(torch.randn(6, 8)).sum().backward()
with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(torch.randn(6, 8), torch.randn(6, 8))
    try:
        moe(dual)
    except NotImplementedError:
        pass
    else:
        raise AssertionError("a tangent was dropped")
"""


# each runs in a fork of a process that has imported torch once
FORKS = """
import os, sys, traceback, torch, torch._dynamo
text, *names = sys.argv[1:]
for without in names:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(text)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"it needs {without}")
"""


def test_it_works_without_each_private_name():
    command = [sys.executable, "-c", FORKS, RUN, *WITHOUT.values()]
    child = captured(command, cwd=ROOT)
    assert child.returncode == 0, child.stderr[-3000:]
