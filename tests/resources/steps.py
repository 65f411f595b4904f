"""`main(WAY)`: one step many times over in a process that watches itself; prints a line of json with what grew.

After a warm-up nothing may: tensors, open files, threads, and the resident set but for a slack of a few hundred blocks of the
allocator. Planted leaks show that each is seen.
"""

import gc
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from tests.hf import tiny
from tests.support import limited
from tests.support.stress import scaled

T, H, I = 32, 64, 64
SLACK = 3 << 20


def layer_step(backend: str) -> Callable[[], None]:
    """Forward, backward, AdamW on a layer with a balance loss, of `backend`."""
    os.environ["MOE_RUNTIME_BACKEND"] = backend
    layer = MoE(MoEConfig(hidden_size=H, intermediate_size=I, num_experts=4, top_k=2))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, foreach=False)

    def step():
        optimizer.zero_grad()
        layer(torch.randn(T, H)).square().mean().backward()
        optimizer.step()

    return step


def merge_step() -> Callable[[], None]:
    """A step of learning the mixture, each followed by another batch."""
    from moe_runtime.methods import xft

    model = tiny.dense("llama", mlp_bias=False)
    xft.upcycle(model, num_experts=4, top_k=2)
    model = xft.to_mergeable(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = tiny.batch(2, 16)

    def step():
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def generate() -> Callable[[], None]:
    """Eight tokens of an upcycled model."""
    model = tiny.upcycled().eval()
    ids = tiny.batch(2, 5)
    return lambda: model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)


def stream() -> Callable[[], None]:
    """Rows of a jsonl file packed to blocks, and a folder read tensor by tensor."""
    from moe_runtime.io.checkpoint import Checkpoint
    from moe_runtime.io.rows import pack
    from tests.support.upit import make_tokenizer

    folder = tempfile.mkdtemp()
    tiny.dense().save_pretrained(folder)
    tokenizer, documents = make_tokenizer(), ["some words of a text " * n for n in range(1, 9)]

    def step():
        pack(tokenizer, documents, 64)
        with Checkpoint(folder) as checkpoint:
            for key in checkpoint.keys():
                checkpoint.get(key)

    return step


def merge_experts() -> Callable[[], None]:
    """Stacks merged, forward and backward."""
    from moe_runtime.ops.merging import merge_experts, mixing

    stack, logits = torch.randn(4, H, I, requires_grad=True), torch.zeros(3, requires_grad=True)

    def step():
        stack.grad = logits.grad = None
        merge_experts(stack, mixing(logits, 0.75)).square().sum().backward()

    return step


def planted(leak: Callable[[list], None]) -> Callable[[], Callable[[], None]]:
    kept = []
    return lambda: lambda: leak(kept)


def _thread(kept: list) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


# a way: what makes its step, and how many steps are watched
WAYS = {
    "torch": (lambda: layer_step("torch"), scaled(400, 1000)),
    "cpp": (lambda: layer_step("cpp"), scaled(400, 1000)),
    "triton": (lambda: layer_step("triton"), scaled(6, 1000)),
    "merge step": (merge_step, scaled(80, 1000)),
    "merge_experts": (merge_experts, scaled(400, 1000)),
    "generate": (generate, scaled(10, 1000)),
    "stream": (stream, scaled(40, 1000)),
}
PLANTED = {
    "a tensor": (planted(lambda kept: kept.append(torch.zeros(1))), 50),
    "a file": (planted(lambda kept: kept.append(os.open(os.devnull, os.O_RDONLY))), 50),
    "a thread": (planted(_thread), 20),
    "bytes": (planted(lambda kept: kept.append(bytearray(os.urandom(16 << 10)))), 1000),
}


def held() -> dict[str, int]:
    """Return how much of each thing the process has now."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    tensors = sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor))
    threads, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    return {"tensors": tensors, "threads": len(threads), "files": len(files), "bytes": limited.memory("VmRSS")}


def grown(make: Callable[[], Callable[[], None]], steps: int) -> dict[str, int]:
    """Return what grew over `steps` steps, after as many warm ones as a quarter of them."""
    step = make()
    for _ in range(max(steps // 4, 3)):
        step()
    first = held()
    for _ in range(steps):
        step()
    last = held()
    more = {name: last[name] - first[name] for name in first}
    return {name: count for name, count in more.items() if count > (SLACK if name == "bytes" else 0)}


def main(*names: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "triton" in names:
        from tests.support import interp_fast, interp_fix

        interp_fix.install()
        interp_fast.install()
    for name in names:
        gc.collect()
        gc.freeze()  # what is there already, some 500,000 objects, would be gone through each time and cannot grow
        if name in WAYS:
            os.environ.pop("MOE_RUNTIME_BACKEND", None)
        make, steps = (WAYS | PLANTED)[name]
        print(json.dumps({"way": name, "steps": steps, "grown": grown(make, steps)}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(*sys.argv[1:])
