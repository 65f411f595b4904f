"""Forty bugs that somebody could write, planted one at a time: `make test` must fail for each.

    python -m tests.support.planted                    # each bug, with the test files that it names
    python -m tests.support.planted --only io          # some of them, by a part of their names
    python -m tests.support.planted --all              # each bug, with everything that `make test`
                                                       runs; hours
    python -m tests.support.planted --check            # only that each bug's line is still there,
                                                       once

Works on a copy of the working tree's files. A bug is a line that is replaced; where the line has
moved to another file of the package it is found there. One whose line is gone says so and wants
another line: what it breaks, not where, is what counts.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")
OPS = "moe_runtime/ops"
KERNELS = "kernels"
CSRC = "csrc"
MODULES = "moe_runtime/modules"
HF = "moe_runtime/hf"
METHODS = "moe_runtime/methods"
IO = "moe_runtime/io"


class Bug(NamedTuple):
    """One replaced line."""

    what: str  # it breaks
    file: str  # where the line is expected
    old: str
    new: str
    tests: str  # files that see it, separated by spaces, below tests/


BUGS = [
    # ops
    Bug(
        "dropped slots keep their weight",
        f"{OPS}/dispatch.py",
        "masked_fill((topk_idx < 0) | (topk_idx >= num_experts), 0)",
        "masked_fill(topk_idx < 0, 0)",
        "ops/test_dispatch.py ops/test_moe_mlp.py ops/test_moe_mlp_cpp.py",
    ),
    Bug(
        "bias gradient of the down projection ignores the routing weight",
        f"{OPS}/expert_rows.py",
        "grads.down_bias[e].copy_(weight @ dy.to(weight.dtype))",
        "grads.down_bias[e].copy_(dy.sum(0))",
        "ops/test_moe_mlp.py",
    ),
    Bug(
        "bias gradient of the up projection is dropped",
        f"{OPS}/expert_rows.py",
        "grads.up_bias[e].copy_(dz.sum(0))",
        "grads.up_bias[e].zero_()",
        "ops/test_moe_mlp.py",
    ),
    Bug(
        "the shared expert gets the largest probability, not the rest",
        f"{OPS}/routing.py",
        "torch.cat([weight, 1 - s_max], -1)",
        "torch.cat([weight, s_max], -1)",
        "ops/test_routing.py",
    ),
    Bug(
        "the gate's gradient forgets the factor s_max",
        f"{OPS}/routing.py",
        "ds[:, 0] += (q * dw).sum(-1)",
        "ds[:, 0] += 0",
        "ops/test_routing.py",
    ),
    Bug(
        "mixing coefficients do not sum to 1",
        f"{OPS}/merging.py",
        "(1 - shared_rate) * logits.softmax(-1)])",
        "logits.softmax(-1)])",
        "ops/test_merging.py",
    ),
    Bug(
        "the balance loss counts the shared expert",
        f"{OPS}/balance.py",
        "config.num_routed_experts * (f *",
        "config.num_experts * (f *",
        "ops/test_balance.py",
    ),
    Bug(
        "DARE scales what it keeps the wrong way round",
        f"{OPS}/expansion.py",
        "1 / (1 - drop)",
        "(1 - drop)",
        "ops/test_expansion.py",
    ),
    Bug(
        "the gate's gradient of fused logits is not normalized",
        f"{OPS}/fusion_torch.py",
        "self.mean / self.total[:, 0] - self.targets",
        "self.mean - self.targets",
        "ops/test_fusion.py",
    ),
    # kernels
    Bug(
        "the last row of each tile is skipped",
        f"{KERNELS}/grouped_gemm.py",
        "        live = m < rows_left\n",
        "        live = m < rows_left - 1\n",
        "ops/test_moe_mlp_kernel.py",
    ),
    Bug(
        "the last slot of a token is not summed",
        f"{KERNELS}/combine.py",
        "live = (t < T) & (k0 + j < K)",
        "live = (t < T) & (k0 + j < K - 1)",
        "ops/test_combine_kernel.py",
    ),
    Bug(
        "a slot counts itself among those in front of it",
        f"{KERNELS}/dispatch.py",
        "(j[None, :] < i[:, None])",
        "(j[None, :] <= i[:, None])",
        "ops/test_dispatch_kernel.py",
    ),
    Bug(
        "only the last group of experts is merged",
        f"{KERNELS}/merging.py",
        "acc += tl.sum(tl.load(alpha_ptr",
        "acc = tl.sum(tl.load(alpha_ptr",
        "ops/test_merging_kernel.py",
    ),
    Bug(
        "the shared expert's weight is s_max in the kernel",
        f"{KERNELS}/routing.py",
        "tl.store(weight_ptr + slots + K, 1 - largest",
        "tl.store(weight_ptr + slots + K, largest",
        "ops/test_routing_kernel.py",
    ),
    Bug(
        "quick_gelu's slope lacks its constant",
        f"{KERNELS}/activation.py",
        "1.702 * value * (1 - s)",
        "value * (1 - s)",
        "ops/test_moe_mlp_kernel.py ops/test_grouped_gemm_kernel.py",
    ),
    Bug(
        "the gradient of LoRA's ranks is not scaled",
        f"{KERNELS}/lora_backward.py",
        "(scaling * dgate).to(",
        "(dgate).to(",
        "ops/test_lora_kernel.py ops/test_lora.py",
    ),
    # csrc
    Bug(
        "the CPU kernel forgets the routing weight",
        f"{CSRC}/cpu/experts.h",
        "const float w = f.weight[slot];",
        "const float w = 1.0f;",
        "ops/test_moe_mlp_cpp.py",
    ),
    Bug(
        "the last expert has no gradient on the CPU",
        f"{CSRC}/cpu/merging.h",
        "for (; e < m.E; e++) block_dots",
        "for (; e + 1 < m.E; e++) block_dots",
        "ops/test_merging_cpp.py",
    ),
    Bug(
        "the CPU kernel adds the gate's bias to up",
        f"{CSRC}/cpu/experts.h",
        "add_bias(sums + C, some, bias + up_from,",
        "add_bias(sums + C, some, bias,",
        "ops/test_moe_mlp_cpp.py",
    ),
    Bug(
        "the CPU kernel drops the gradient that it adds to",
        f"{CSRC}/cpu/gradients.h",
        "v = load_up_to(out + n, some) + load(product);",
        "v = load(product);",
        "ops/test_moe_mlp_cpp_backward.py",
    ),
    Bug(
        "the CPU kernel drops the last row of a block",
        f"{CSRC}/cpu/gradients.h",
        "length = last ? block.rows.end - r : B::DEPTH, steps",
        "length = last ? block.rows.end - r - 1 : B::DEPTH, steps",
        "ops/test_moe_mlp_cpp_backward.py",
    ),
    Bug(
        "the CPU kernel forgets what it summed before",
        f"{CSRC}/cpu/tiles.h",
        "depth, k > 0, to",
        "depth, false, to",
        "ops/test_moe_mlp_cpp_backward.py",
    ),
    Bug(
        "the CUDA merge forgets earlier groups of experts",
        f"{CSRC}/merging.cu",
        "sum[n] = e0 + j ?",
        "sum[n] = j ?",
        "csrc/test_emulated.py",
    ),
    Bug(
        "the CUDA combine ignores the weights",
        f"{CSRC}/combine.cu",
        "const float w = s.weight[t * s.K + k0 + j];",
        "const float w = 1.f;",
        "csrc/test_emulated.py",
    ),
    # modules
    Bug(
        "the noise of the gate is not scaled",
        f"{MODULES}/moe.py",
        "noise = eps * scale",
        "noise = eps",
        "modules/test_moe.py",
    ),
    Bug(
        "a stale mixture is used after the logits moved",
        f"{MODULES}/merged.py",
        "elif kept is None or not torch.equal(alpha, kept.seen):",
        "elif kept is None:",
        "modules/test_merged_kept.py modules/test_merged.py",
    ),
    Bug(
        "the fuser's sample loss is divided by tokens",
        f"{MODULES}/fuser.py",
        'loss / labels.shape[0] if reduction == "sample" else loss',
        'loss / labels.numel() if reduction == "sample" else loss',
        "modules/test_fuser.py",
    ),
    Bug(
        "trained rows fold into other experts",
        f"{MODULES}/trainable.py",
        "stack.index_copy_(0, index, rows",
        "stack.index_copy_(0, index.flip(0), rows",
        "modules/test_trainable.py",
    ),
    # hf
    Bug(
        "the last layer is not upcycled",
        f"{HF}/models/swap.py",
        "    for layer in layers:\n        path = family.path.format(layer)\n",
        "    for layer in layers[:-1]:\n        path = family.path.format(layer)\n",
        "hf/models/test_swap.py methods/xft/test_xft.py",
    ),
    Bug(
        "gate and up change places in the merged model",
        f"{HF}/models/families.py",
        "[part.clone() for part in weight.chunk(len(family.up))]",
        "[part.clone() for part in weight.chunk(len(family.up))][::-1]",
        "hf/models/test_families.py hf/models/test_swap.py",
    ),
    Bug(
        "gradient accumulation counts the balance loss once a call",
        f"{HF}/common/outputs.py",
        "return labels.ne(-100).sum().to(device) / items",
        "return 1.0",
        "hf/models/test_outputs.py hf/dropin/test_balance.py hf/training/test_trainer.py",
    ),
    Bug(
        "the clamp of a stock model's gate is lost",
        f"{HF}/dropin/gates.py",
        "return Activation(act, activation.gated, limit,",
        "return Activation(act, activation.gated, None,",
        "hf/dropin/test_experts.py hf/dropin/test_experts_families.py",
    ),
    Bug(
        "all else trains beside the selected experts",
        f"{HF}/training/trainable.py",
        "parameters[name].requires_grad_(trains)",
        "parameters[name].requires_grad_(True)",
        "hf/training/test_trainable.py",
    ),
    # methods
    Bug(
        "ESFT takes the experts of the lowest scores",
        f"{METHODS}/esft/selection.py",
        "key=lambda group: (-total[group], min(group))",
        "key=lambda group: (total[group], min(group))",
        "methods/esft/test_selection.py",
    ),
    Bug(
        "ESFT scores count padding",
        f"{METHODS}/esft/recorder.py",
        "(topk_idx < E) & live[:, None]",
        "(topk_idx < E)",
        "methods/esft/test_recorder.py methods/esft/test_scores.py",
    ),
    Bug(
        "an adapter that is removed leaves its weights",
        f"{METHODS}/esft/adapters.py",
        "_put(parameters[name], ids, values)",
        "_put(parameters[name], ids, values.clone().mul_(1.001))",
        "methods/esft/test_adapters.py",
    ),
    Bug(
        "merging uses the uniform mixture, not what was learned",
        f"{METHODS}/xft/__init__.py",
        "            alpha = layer.alpha()\n",
        "            alpha = torch.full_like(layer.alpha(), 1 / len(layer.alpha()))\n",
        "methods/xft/test_xft.py",
    ),
    Bug(
        "UpIT's buckets hold one row too many",
        f"{METHODS}/upit/buckets.py",
        "if len(buckets[expert]) < capacity:",
        "if len(buckets[expert]) <= capacity:",
        "methods/upit/test_buckets.py",
    ),
    Bug(
        "UpIT stacks the experts in another order than their routers",
        f"{METHODS}/upit/assembly.py",
        "zip(self.opened, stack, strict=True)",
        "zip(self.opened[::-1], stack, strict=True)",
        "methods/upit/test_assembly.py",
    ),
    Bug(
        "UltraFuser's sampler draws one domain only",
        f"{METHODS}/ultrafuser/training.py",
        "places.setdefault(domain, []).append(place)",
        "places.setdefault(domain, [0]).append(place)",
        "methods/ultrafuser/test_sampling.py",
    ),
    # io
    Bug(
        "a file is not flushed before it is renamed",
        f"{IO}/files.py",
        "        _sync(tmp / path.name)\n",
        "",
        "io/test_files.py",
    ),
    Bug(
        "a part of a tensor is read from its beginning",
        f"{IO}/checkpoint.py",
        "stream.seek(start + skip)",
        "stream.seek(start)",
        "io/test_checkpoint.py",
    ),
    Bug(
        "the index names the shard before a tensor's own",
        f"{IO}/checkpoint.py",
        "self._shard_of[key] = self._shards + 1",
        "self._shard_of[key] = max(self._shards, 1)",
        "io/test_checkpoint.py",
    ),
]


def place(root: Path, bug: Bug) -> Path:
    """Return the file that has the bug's line, exactly once; LookupError if none or several have
    it.
    """
    named = root / bug.file
    if named.is_file() and named.read_text().count(bug.old) == 1:
        return named
    files = [
        path
        for top in ("moe_runtime", "kernels", "csrc")
        for kind in SOURCES
        for path in (root / top).rglob(kind)
    ]
    links = root / "moe_runtime" / "kernels"
    found = [
        path for path in files if links not in path.parents and path.read_text().count(bug.old) == 1
    ]
    if len(found) != 1:
        raise LookupError(
            f"{bug.file} has no {bug.old!r} any more, nor has one other file; plant {bug.what!r} "
            "elsewhere"
        )
    return found[0]


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows, and new ones that it does not ignore, to `folder`."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        target = folder / name
        if os.path.lexists(ROOT / name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


def failures(
    root: Path, tests: list[str], options: list[str], timeout: float | None = None
) -> list[str]:
    """Run pytest as `make test` selects; return the tests that failed, RuntimeError where it could
    not run.
    """
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *options,
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {timeout:.0f} s") from None
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
        )
    return re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", done.stdout, re.MULTILINE)


def main() -> int:
    """Plant each bug and say whether it was caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of a bug's description or file")
    parser.add_argument(
        "--all", action="store_true", help="run everything, not the test files that a bug names"
    )
    parser.add_argument("--check", action="store_true", help="only look whether each line is there")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds for one bug; --all has none"
    )
    args = parser.parse_args()
    bugs = [bug for bug in BUGS if args.only in f"{bug.file} {bug.what}"]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = ROOT if args.check else copy_tree(Path(folder))
        missed = []
        files = {
            str(Path("tests", name))
            for bug in bugs
            for name in bug.tests.split()
            if (root / "tests" / name).is_file()
        }
        # what fails without a bug sees none
        broken = [] if args.check else failures(root, [] if args.all else sorted(files), [])
        for name in broken:
            print(f"fails without any bug: {name}", flush=True)
        options = ["-x", *(f"--deselect={name}" for name in broken)]
        for number, bug in enumerate(bugs, 1):
            start = time.monotonic()
            try:
                file = place(root, bug)
                tests = [str(Path("tests", name)) for name in bug.tests.split()]
                if absent := [name for name in tests if name not in files]:
                    raise LookupError(
                        f"{', '.join(absent)} is gone; name the files that see {bug.what!r}"
                    )
                if args.check:
                    continue
                source = file.read_text()
                file.write_text(source.replace(bug.old, bug.new))
                try:
                    seen = failures(
                        root, [] if args.all else tests, options, None if args.all else args.timeout
                    )
                finally:
                    file.write_text(source)
            except (LookupError, RuntimeError) as error:
                if isinstance(error, LookupError) or "no end" in str(error):
                    seen = []
                else:
                    seen = [f"?? {error}"]
                print(f"{number:2} {error}", flush=True)
            if not seen or seen[0].startswith("??"):
                missed.append(bug)
            word = f"caught by {seen[0]}" if seen else "NOT CAUGHT"
            print(f"{number:2} {time.monotonic() - start:4.0f} s  {bug.what}: {word}", flush=True)
    print(
        f"{len(bugs) - len(missed)} of {len(bugs)} {'can be planted' if args.check else 'caught'}"
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
