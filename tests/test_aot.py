"""Every Triton kernel compiles for the GPUs we ship to, without spills, on a machine that has none of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MERGING = {"weight_ptr": "*bf16:16", "P": "i64:16", "stride_e": "i64:16"}
KERNELS = {  # module.kernel: signature (":16" as the JIT specialises what 16 divides), constants
    "merging._merge_experts_fwd_kernel": (
        MERGING | {"alpha_ptr": "*fp32:16", "out_ptr": "*bf16:16"},
        {"E": 8, "BLOCK_P": 2048},
    ),
    "merging._merge_experts_bwd_alpha_kernel": (
        MERGING | {"dout_ptr": "*bf16:16", "partial_ptr": "*fp32:16", "blocks": "i32"},
        {"E": 8, "BLOCK_P": 2048},
    ),
}
SCRIPT = """
import importlib, json, re, subprocess, sys, tempfile, pathlib, triton
from triton.backends.compiler import GPUTarget
tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
cubin = pathlib.Path(tempfile.mkdtemp()) / "k.cubin"
kernels, capabilities = json.loads(sys.argv[1])
for name, (signature, constants) in kernels.items():
    module, kernel = name.split(".")
    fn = getattr(importlib.import_module("moe_runtime.kernels." + module), kernel)
    attrs = {(fn.arg_names.index(a),): [["tt.divisibility", 16]] for a, t in signature.items() if t.endswith(":16")}
    types = {a: signature.get(a, "constexpr").split(":")[0] for a in fn.arg_names}
    source = triton.compiler.ASTSource(fn, types, constexprs=constants, attrs=attrs)
    for capability in capabilities:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True).stdout
        print(json.dumps({"kernel": name, "capability": capability, "wide": "LDG.E.128" in sass,
                          "stack": int(re.search(r"STACK:(\\d+)", usage)[1]),
                          "registers": int(re.search(r"REG:(\\d+)", usage)[1]),
                          "atomics": "RED" in sass or "ATOM" in sass}))
"""


CAPABILITIES = [80, 86, 89, 90, 100, 120]


@pytest.fixture(scope="module")
def reports():
    """What each kernel became, by name and capability; compiled in one process that does not interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argument = json.dumps([KERNELS, CAPABILITIES])
    out = subprocess.run([sys.executable, "-c", SCRIPT, argument], env=env, capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr[-2000:]
    reports = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    return {(report["kernel"], report["capability"]): report for report in reports}


@pytest.mark.aot
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_without_spills(reports, kernel, capability):
    report = reports[kernel, capability]
    assert report["stack"] == 0 and report["registers"] <= 128
    assert report["wide"] and not report["atomics"]


def test_no_kernel_is_missing_from_this_list():
    found = {
        f"{path.stem}.{line.split('(')[0].removeprefix('def ')}"
        for path in (ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    assert found == set(KERNELS)
