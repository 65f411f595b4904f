"""Checks that a reader of kernels and launchers makes without running them.
tests/ops/test_host_sync.py runs the launchers.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import planted

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
OPS = sorted((ROOT / "moe_runtime" / "ops").glob("*.py"))
# where a value may be read back: code of the torch backend, and helpers outside of a step
MAY_SYNC = {
    "moe_mlp_cpp.py": "the CPU's backend: its tensors are on the host",
    "frozen_mlp_torch.py": "the torch and cpp backends: they loop over experts on the host",
    "moe_mlp_torch.py": "the torch backend: it loops over experts on the host",
    "workspace.py": "the torch backend's memory",
    "dispatch.py:_sorted_on_cpu": "keys on the host",
    "all_to_all.py:_split_sizes": "torch.distributed takes split sizes from the host",
    "grouped_gemm.py:_segments": "the torch backend's offsets",
    "expert_rows.py:trained_rows": "the CPU's backends, which loop over experts on the host",
    "merging.py:soup_logits": "numbers for an initialization",
    "merging.py:check_mixture": "learned numbers, read once",
    "merging.py:alpha_rows": "a user's numbers, read once",
    "lora_cpp.py": "a CPU backend",
    "lora_torch.py": "the torch backend: it loops over experts on the host",
    "packed.py:dynamic_map": "a table of the host, made once",
    "expansion.py:farthest_pair": "its result is a decision of the host",
}
SYNC = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "synchronize",
    "masked_select",
    "unique",
    "is_nonzero",
    "equal",
}


def functions(tree: ast.Module, jit: bool) -> Iterator[ast.FunctionDef]:
    """Return the functions of a module that are kernels (or parts of them), or the others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
            if ("jit" in decorators) == jit:
                yield node


def calls(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call with the text of the callee."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            yield child, ast.unparse(child.func)


def keywords(call: ast.Call) -> set[str]:
    return {k.arg for k in call.keywords}


def shared_keywords(call: ast.Call) -> set[str]:
    """Return the keys of the dicts that functions of kernels/ return as **function(...)."""
    names = set()
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Call):
            names.add(ast.unparse(keyword.value.func))
    keys = set()
    for path in KERNELS if names else ():
        for f in ast.parse(path.read_text()).body:
            if isinstance(f, ast.FunctionDef) and f.name in names:
                for node in ast.walk(f):
                    if isinstance(node, ast.Dict):
                        keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return keys


# (a) the host never waits for the GPU
def host_syncs(tree: ast.Module, file: str) -> list[str]:
    """Yield calls that read a tensor's values on the host."""
    bad = []
    for f in functions(tree, jit=False):
        if file in MAY_SYNC or f"{file}:{f.name}" in MAY_SYNC:
            continue
        for call, name in calls(f):
            to_cpu = name.endswith(".to") and "'cpu'" in ast.unparse(call)
            if to_cpu or name.split(".")[-1] in SYNC:
                bad.append(f"{file}:{call.lineno}: {name} waits for the GPU")
    return bad


# (b) code that has another meaning in the interpreter, or in another version of Triton
ONLY_SOME_TRITONS = {
    "make_block_ptr",
    "advance",
    "make_tensor_ptr",
    "softmax",
    "squeeze",
    "unsqueeze",
    "aggregate",
    "aggregate_replace",
    "inline_asm_elementwise",
    "autotune",
    "libdevice",
    "fdiv",
}


def kernel_mistakes(tree: ast.Module, file: str) -> list[str]:
    """Yield atomics, tensors in `and`, loads and products that rely on a default, and calls that
    not every Triton version has.
    """
    bad = [*launch_mistakes(tree)]
    for f in functions(tree, jit=True):
        for node in ast.walk(f):
            negates = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
            if (negates or isinstance(node, ast.BoolOp)) and not is_constant(node, f):
                bad.append((node, f"{ast.unparse(node)} takes tensors' truth; use & or |"))
            if isinstance(node, ast.Compare) and len(node.ops) > 1:
                bad.append((node, f"{ast.unparse(node)} is a chain; use two comparisons and &"))
        for call, name in calls(f):
            for why in call_mistakes(call, name):
                bad.append((call, why))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if name.split(".")[-1] in ONLY_SOME_TRITONS:
                why = "is not in every Triton, not in its interpreter, or not reproducible"
                bad.append((node, f"{name} {why}"))
        if isinstance(node, ast.keyword) and node.arg == "warp_specialize":
            bad.append((node, "warp_specialize= is compiled wrongly for sm_90 by Triton 3.6"))
    return [f"{file}:{getattr(node, 'lineno', 1)}: {why}" for node, why in bad]


def launch_mistakes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield launches that rely on the default of fusion, and names that do not identify a
    kernel.
    """
    launched = set()
    for node in ast.walk(tree):
        if is_launch(node):
            launched.add(node.func.value.id)
            if "enable_fp_fusion" not in keywords(node) | shared_keywords(node):
                yield node, "a launch without enable_fp_fusion="
    for name in launched:
        if not re.fullmatch(r"_\w+_kernel", name):
            yield tree.body[0], f"{name} is launched; name it _<op>_kernel"
    for f in functions(tree, jit=True):
        if f.name.endswith("_kernel") and f.name not in launched:
            yield f, f"{f.name} is named like a kernel and never launched"


def call_mistakes(call: ast.Call, name: str) -> Iterator[str]:
    given = keywords(call)
    if name.startswith("tl.atomic"):
        yield f"{name}: the order of atomics, so the sum, differs from run to run"
    if name == "tl.load" and "mask" in given and "other" not in given:
        yield "tl.load with mask= and no other="
    if name == "tl.load" and len(call.args) > 1:
        yield "tl.load with more than the pointer by position"
    if name == "tl.dot":
        accumulates = len(call.args) == 3 or "acc" in given
        if not accumulates or "input_precision" not in given:
            yield "tl.dot without an accumulator or input_precision="


def is_launch(node: ast.AST) -> bool:
    """Whether a call is kernel[grid](...) with a plain name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
        return False
    kernel = node.func.value
    return isinstance(kernel, ast.Name) and kernel.id not in ("dict", "list", "tuple")


def is_constant(node: ast.AST, f: ast.FunctionDef) -> bool:
    """Whether an expression consists of constexpr arguments and names, and comparisons with
    None.
    """
    constants = set()
    for one in f.args.args:
        if one.annotation is not None and "constexpr" in ast.unparse(one.annotation):
            constants.add(one.arg)
    for one in ast.walk(f):
        if isinstance(one, ast.AnnAssign) and "constexpr" in ast.unparse(one.annotation):
            constants.add(one.target.id)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return True
    if isinstance(node, ast.Name):
        return node.id in constants
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return all(is_constant(part, f) for part in parts)


# (c) a row times a stride has 64 bits; strides, and the dims that replace one in a contiguous
# tensor
LENGTH = re.compile(r"(?i:stride)\w*|width|[A-Z]")
NARROW = {  # file:function:product -> the reason
    "combine.py:sum_slots:t * K": "every caller's t is int64",
    "tiles.py:cells:rows[:, None] * stride": "callers widen rows, which is checked there",
}


def narrow_offsets(tree: ast.Module, file: str, known=NARROW) -> list[str]:
    """Yield products with a stride, or with a dim in its place, that int32 may not hold."""
    bad = []
    for f in functions(tree, jit=True):
        defined = definitions(f)
        for node in ast.walk(f):
            for length, other in products(node):
                is_length = isinstance(length, ast.Name) and LENGTH.fullmatch(length.id)
                if not is_length or is_small(other, f):
                    continue
                place = f"{file}:{f.name}:{ast.unparse(node)}"
                is_known = place in known or is_wide(other, defined) or is_wide(length, defined)
                if not is_known:
                    bad.append(f"{place} (line {node.lineno}) overflows int32; use .to(tl.int64)")
    return bad


def products(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Yield each factor of a product that may be a length, with the other one."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "cells":
        return [(node.args[1], node.args[0])]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [(node.left, node.right), (node.right, node.left)]
    return []


def lines_of(lint, paths, *more) -> list[str]:
    """Return a lint's findings for files."""
    lines = []
    for path in paths:
        lines += lint(ast.parse(path.read_text()), path.name, *more)
    return lines


def definitions(f: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return what each name of a function is set to."""
    found = {}
    for node in ast.walk(f):
        pairs = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                together = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts) if together else [(target, node.value)]
        elif isinstance(node, ast.AugAssign):
            pairs.append((node.target, node.value))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


def is_wide(node: ast.AST, defined: dict[str, list[ast.expr]], seen: tuple[str, ...] = ()) -> bool:
    """Whether .to(tl.int64) is in an expression or in all values of its names."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".to"):
        return "tl.int64" in ast.unparse(node.args[0])
    if isinstance(node, ast.Name):
        values = [] if node.id in seen else defined.get(node.id, [])
        return bool(values) and all(is_wide(value, defined, (*seen, node.id)) for value in values)
    if isinstance(node, ast.Compare):
        return False
    children = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return any(is_wide(child, defined, seen) for child in children)


def is_small(node: ast.AST, f: ast.FunctionDef) -> bool:
    """Whether it is a number or a constant of the kernel: multiplied by these, a value is a size,
    not yet an offset.
    """
    return isinstance(node, ast.Constant) or is_constant(node, f)


LINTS = {host_syncs: KERNELS + OPS, kernel_mistakes: KERNELS, narrow_offsets: KERNELS}


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_sources(lint):
    assert lines_of(lint, LINTS[lint]) == []


JIT = "@triton.jit\ndef f(a, b, p, m, n, row, stride_x, H, C: tl.constexpr):\n    "


WIDENED_ONCE = "r = a.to(tl.int64)\n    if a:\n        r = a\n    return p + r * stride_x"


WORK = "@triton.jit\ndef work(p):\n    pass\ndef go(p):\n    work[(1,)](p)"


MISTAKES = [
    (host_syncs, "def f(x):\n    return x.sum().item()", "x.sum().item waits"),
    (host_syncs, "def f(x):\n    return x.to('cpu')", "x.to waits"),
    (kernel_mistakes, JIT + "tl.atomic_add(p, 1)", "the order of atomics"),
    (kernel_mistakes, JIT + "tl.load(p, mask=m)", "no other="),
    (kernel_mistakes, JIT + "return (a > 0) and (b > 0)", "takes tensors' truth"),
    (kernel_mistakes, JIT + "return 0 <= a < n", "is a chain"),
    (kernel_mistakes, JIT + "tl.dot(a, b, input_precision='ieee')", "without an accumulator"),
    (kernel_mistakes, JIT + "return tl.softmax(a)", "not in every Triton"),
    (kernel_mistakes, WORK, "name it _<op>_kernel"),
    (kernel_mistakes, "def go(p):\n    _a_kernel[(1,)](p)", "without enable_fp_fusion="),
    (narrow_offsets, JIT + "return p + row * stride_x", "row * stride_x"),
    (narrow_offsets, JIT + "return p + row[:, None] * H", "row[:, None] * H"),
    (narrow_offsets, JIT + WIDENED_ONCE, "r * stride_x"),
]


@pytest.mark.parametrize("lint, text, says", MISTAKES)
def test_lints_see(lint, text, says):
    assert says in " ".join(lint(ast.parse(text), "x.py"))


GOOD = """
def launch(x, sizes):
    y = torch.empty(dict[str, int](sizes))
    if x is None or not sizes:
        _a_kernel[(1,)](x, x.stride(0), GATED=True, enable_fp_fusion=True)
@triton.jit
def _part(p, row, stride_x, GATED: tl.constexpr, WH: tl.constexpr):
    if GATED or not WH:
        p += row.to(tl.int64)[:, None] * stride_x
    at = (row + 1).to(tl.int64)
    if p is not None and GATED:
        at = row.to(tl.int64)
    return tl.load(p + at * stride_x, mask=(at > 0) & (row < 2), other=0.0)
@triton.jit
def _a_kernel(p, stride_x, GATED: tl.constexpr):
    acc = tl.dot(p, p, p, input_precision="ieee")
"""


def test_lints_let_the_rest_pass():
    for lint in LINTS:
        assert lint(ast.parse(GOOD), "x.py") == []


def test_exceptions_still_exist():
    names = set()
    for path in OPS:
        names.add(path.name)
        for f in functions(ast.parse(path.read_text()), jit=False):
            names.add(f"{path.name}:{f.name}")
    assert set(MAY_SYNC) <= names
    narrow = lines_of(narrow_offsets, KERNELS, ())
    assert {line.rpartition(" (line")[0] for line in narrow} == set(NARROW)


def test_the_planted_bugs_still_have_a_place(capsys):
    """Covers the texts of `tests.support.planted`, whose full run takes hours, and the tests that
    it names.
    """
    table = planted.bugs()
    assert planted.check(ROOT, table) == len(table) >= 150, capsys.readouterr().out


def test_slow_toml_names_tests():
    missing = []
    for folder, entries in tomllib.loads((ROOT / "tests" / "slow.toml").read_text()).items():
        for entry in entries:
            file, _, name = entry.partition("::")
            function = name.partition("[")[0]
            path = ROOT / "tests" / folder / file
            if not path.is_file() or f"def {function}(" not in path.read_text():
                missing.append(f"{folder}: {entry}")
    assert missing == []
