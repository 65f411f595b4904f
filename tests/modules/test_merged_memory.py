"""Memory of the merge stage besides the experts, which it holds once: every allocation of a
training step is recorded.
"""

import itertools

import torch
from torch.profiler import ProfilerActivity, profile

from moe_runtime.methods import xft
from moe_runtime.modules.merged import MergedMLP
from tests.hf import tiny

E = 8
H = 64
I = 512


def allocations(function) -> list[int]:
    """Return the bytes allocated (positive) and freed (negative) while `function` runs, including
    inside ops, in order.
    """
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,
    ) as seen:
        function()
    # seen.events() attributes most of them to ops
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return [
        event.nbytes()
        for event in sorted(
            events,
            key=lambda event: event.start_ns(),
        )
    ]


def peak(sizes: list[int]) -> int:
    return max(itertools.accumulate(sizes), default=0)


def mergeable():
    model = tiny.dense(
        "llama",
        torch.bfloat16,
        hidden_size=H,
        intermediate_size=I,
        mlp_bias=False,
    )
    xft.upcycle(model, num_experts=E, top_k=2)
    return xft.to_mergeable(model).train()


def layers_of(model) -> list[MergedMLP]:
    return [module for module in model.modules() if isinstance(module, MergedMLP)]


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_a_step_holds_the_experts_once_and_makes_no_stack():
    model = mergeable()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.1,
    )
    ids = tiny.batch(1, 8)

    def step():
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    step()
    for layer in layers_of(model):
        layer.release()
    sizes = allocations(step)
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    assert {p.dtype for p in stacks} == {torch.bfloat16}
    assert 0 < max(sizes) < min(map(size_of, stacks))
    # the MLPs of one dense model, kept for the next calls
    merged = sum(map(size_of, stacks)) // E
    largest = 4 * max(p[0].numel() for p in stacks)  # one expert's weight in float32
    assert merged <= peak(sizes) < merged + 3 * largest < E * merged
