"""Models on the emulator: steps of training, and a decode step in the order of a captured graph.

    python -m tests.emulator.models 90           # as on a GPU of capability 9.0
    python -m tests.emulator.models 90 --only XFT

Every kernel of the experts runs as compiled; the rest of the model is PyTorch's. Losses and
gradients are compared with those of backend "torch" in the same dtype: one MoE layer, so that both
choose the same experts. Prints lines of JSON, as tests.emulator.cases does.
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

import moe_runtime
from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.methods import esft, xft
from moe_runtime.methods.esft.selection import ExpertSelection
from moe_runtime.modules.moe import MoE
from tests.emulator import driver

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
BOUND = 3e-2  # relative, where both round to bfloat16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _olmoe() -> nn.Module:
    model = OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2))
    moe_runtime.patch(model)
    return model


def _xft() -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    xft.upcycle(model, num_experts=4, top_k=2)
    return model


def _mergeable() -> nn.Module:
    model = _xft()
    xft.to_mergeable(model, shared_rate=0.75)
    return model


def _esft() -> nn.Module:
    model = _olmoe()
    esft.train_only(model, ExpertSelection(experts={0: (1, 5, 6)}))
    return model


MODELS = {"OLMoE": _olmoe, "XFT": _xft, "XFT, mixing": _mergeable, "ESFT": _esft}


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and the gradient of each trained parameter of one step."""
    model(input_ids=ids, labels=ids).loss.backward()
    found = {"loss": model(input_ids=ids, labels=ids).loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


def run_step(name: str) -> dict:
    """Compare a training step."""
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    with torch.no_grad():  # experts that are copies have no gradient of their mixing
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 32)
    other = copy.deepcopy(model)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 40))
    driver.launches.clear()
    actual = gradients(model, ids)
    kernels = sorted(set(driver.launches))
    choose = backends.choose
    backends.choose = lambda op, x, backend=None, cuda_fits=True: backend or "torch"
    try:
        expected = gradients(other, ids)
    finally:
        backends.choose = choose
    worst = 0.0
    for key, value in expected.items():
        error = float((actual[key] - value).float().norm() / value.float().norm().clamp_min(1e-12))
        worst = max(worst, error if error == error else float("inf"))
    problem = None
    if actual.keys() != expected.keys():
        problem = "other parameters have gradients"
    elif not worst < BOUND:
        problem = "wrong gradients"
    elif not kernels:
        problem = "no kernel ran"
    return {"error": worst, "problem": problem, "kernels": kernels}


class Capture(TorchDispatchMode):
    """Records the launches and PyTorch's operations of a step, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and record it; of ours, what it does."""
        kwargs = kwargs or {}
        if func.namespace == "moe_runtime":
            with self:  # the kernel behind the dispatch that called this
                return func.redispatch(CPU, *args, **kwargs)
        outputs = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        if "empty" not in func.name():
            self.steps.append(again)
        return outputs

    def replay(self) -> None:
        """Run everything again, on the contents that the tensors have now."""
        for step in self.steps:
            step()


def run_decode() -> dict:
    """Replay one token's step for another token."""
    torch.manual_seed(0)
    layer = MoE(MoEConfig(hidden_size=128, intermediate_size=64, num_experts=8, top_k=2)).bfloat16()
    x = torch.randn(1, 1, 128, dtype=torch.bfloat16)
    driver.launches.clear()
    graph = Capture()
    driver.on_launch.append(graph.steps.append)
    with torch.no_grad(), graph:
        out = layer(x)
    driver.on_launch.clear()
    kernels = list(driver.launches)
    before = out.clone()
    x.copy_(torch.randn_like(x))
    with torch.no_grad():
        graph.replay()
        expected = layer(x)
    problem = None
    if torch.equal(before, expected) or not torch.equal(out, expected):
        problem = "a replay gives another result than a call"
    return {"error": 0.0, "problem": problem, "kernels": kernels}


def main() -> None:
    """Run what the arguments select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", type=int, help="10 * major + minor of the compute capability")
    parser.add_argument("--only", default="", help="a part of a name")
    args = parser.parse_args()
    driver.install(args.arch)
    for name in [*MODELS, "decode"]:
        if args.only not in name:
            continue
        start = time.monotonic()
        result = run_decode() if name == "decode" else run_step(name)
        seconds = round(time.monotonic() - start, 1)
        print(json.dumps({"name": name, "seconds": seconds} | result), flush=True)


if __name__ == "__main__":
    main()
