"""Mistakes that a machine plants: every place in the functions of a file where an operator, a number, a mask, a dtype, the
order of two arguments, or a whole statement can be another one.

Left out are what refuses wrong input (`raise` and the checks in front of it), fakes, which compute no numbers, and
annotations, decorators and docstrings.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# launch configs and their choice: another one gives the same numbers, more slowly
SPEED_ONLY = ("kernels/candidates.py", "moe_runtime/ops/library.py", "moe_runtime/ops/workspace.py")
# but for the order of tiles, this one is such a choice
SPEED_BUT = {"kernels/tiles.py": ("tile_of",)}
# another process group, or a GPU, runs them
ELSEWHERE = ("moe_runtime/ops/all_to_all.py", "moe_runtime/ops/cuda_kernels.py")

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DTYPES = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}
METHODS = {"float": "bfloat16", "double": "float", "long": "int"}
MASKED = ("load", "store")


class Mutant(NamedTuple):
    """One change of one line, and which of the equal lines in its function it is."""

    file: str
    function: str
    old: str  # the line as it is
    new: str
    kind: str
    line: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.old, self.new


def files() -> list[str]:
    """The files of the ops and kernels, from the root."""
    found = sorted([*ROOT.glob("moe_runtime/ops/*.py"), *ROOT.glob("kernels/*.py")])
    names = [path.relative_to(ROOT).as_posix() for path in found if path.name != "__init__.py"]
    return [name for name in names if name not in SPEED_ONLY + ELSEWHERE]


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What can stand in place of a node, and of which kind the mistake is."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        other = COMPARED[type(node.ops[0])]()
        yield "comparison", ast.Compare(node.left, [other], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        yield "operator", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", node.operand
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "off by one", ast.Constant(node.value + 1)
        elif isinstance(node.value, float):
            yield "constant", ast.Constant(node.value * 1.01 if node.value else 1.0)
    if isinstance(node, ast.Attribute) and node.attr in DTYPES and isinstance(node.value, ast.Name):
        yield "dtype", ast.Attribute(node.value, DTYPES[node.attr])
    if isinstance(node, ast.Call):
        yield from _changed_calls(node)


def _changed_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in METHODS and not node.args and not node.keywords:
        yield "dtype", ast.Call(ast.Attribute(node.func.value, METHODS[method]), [], [])
    simple = all(isinstance(arg, ast.Name | ast.Attribute | ast.Subscript) for arg in node.args[:2])
    if len(node.args) > 1 and simple and ast.unparse(node.args[0]) != ast.unparse(node.args[1]):
        yield "arguments", ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for keyword in node.keywords:
        if keyword.arg == "mask" and method in MASKED:
            true = ast.Compare(keyword.value, [ast.Eq()], [keyword.value])
            others = [ast.keyword("mask", true) if other is keyword else other for other in node.keywords]
            yield "mask", ast.Call(node.func, node.args, others)


def _dropped(node: ast.AST) -> bool:
    """Whether the statement can go, and the function still runs."""
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


# what a launch is compiled with, at which the interpreter does not look, and the lengths of lists that are equal anyway
NO_NUMBERS = ("enable_fp_fusion", "num_warps", "num_stages", "strict")


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "check" in ast.unparse(node.value.func):
        return True
    return isinstance(node, ast.Raise | ast.Assert) or (
        isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse
    )


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under a statement, without what computes nothing."""
    if isinstance(node, ast.keyword) and node.arg in NO_NUMBERS:
        return
    if _is_check(node) or isinstance(node, ast.JoinedStr | ast.FunctionDef | ast.ClassDef):
        return
    yield node
    fields = [value for name, value in ast.iter_fields(node) if name not in ("annotation", "decorator_list")]
    for value in fields:
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _functions(tree: ast.Module, only: tuple[str, ...] | None) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if only is not None and getattr(node, "name", "") not in only:
            continue
        skipped = ("_check", "check", "_fake")
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(skipped) and not node.name.endswith("_fake"):
            yield node


def mutants_of(file: str, source: str | None = None) -> list[Mutant]:
    """Every mutant of a file whose change lies on one line."""
    source = (ROOT / file).read_text() if source is None else source
    lines, found = source.splitlines(), {}
    for function in _functions(ast.parse(source), SPEED_BUT.get(file)):
        for statement in function.body:
            for node in _nodes(statement):
                for kind, text in _texts(node):
                    if node.lineno != node.end_lineno:
                        continue
                    old = lines[node.lineno - 1].encode()
                    new = (old[: node.col_offset] + text.encode() + old[node.end_col_offset :]).decode()
                    mutant = Mutant(file, function.name, old.decode().strip(), new.strip(), kind, node.lineno)
                    found.setdefault((*mutant.key, mutant.line), mutant)
    # of equal lines in a function the first one speaks for all: a table cannot tell them apart
    return [*{mutant.key: mutant for mutant in reversed(found.values())}.values()][::-1]


def _texts(node: ast.AST) -> Iterator[tuple[str, str]]:
    if _dropped(node):
        yield "statement", "pass"
    for kind, other in _changes(node):
        yield kind, f"({ast.unparse(ast.fix_missing_locations(other))})"


def planted(mutant: Mutant, root: Path = ROOT) -> str:
    """The source of the mutant's file with its change."""
    lines = (root / mutant.file).read_text().splitlines(keepends=True)
    line = lines[mutant.line - 1]
    assert line.strip() == mutant.old, f"{mutant.file}:{mutant.line} is {line.strip()!r}; want {mutant.old!r}"
    lines[mutant.line - 1] = line.replace(mutant.old, mutant.new)
    return "".join(lines)
