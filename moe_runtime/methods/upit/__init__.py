"""UpIT, upcycling instruction tuning (arXiv 2410.01610): checkpoints of one tuning run become the
experts of an MoE model.

    (tune)              with any trainer and ExpertCheckpoints     Algorithm 1, lines 1 to 3
    choose_checkpoints  the checkpoints that become experts
    expand_experts      children of the two that differ most       lines 4 and 5, Algorithm 2
    perplexities        of each expert on each example             line 8, Algorithm 3
    fill_buckets        each example to its best expert
    init_routers        tune experts and their routing vectors     lines 6 to 10, Eq. (1) and (2)
    assemble            the experts, the vectors as the router     lines 11 to 13
    (tune)              the assembled model, with any trainer      line 14
    export_mixtral      optionally, write it as a stock Mixtral

    callback = ExpertCheckpoints("saved", every_epochs=0.25, base="base")
    Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback]).train()
    experts = upit.choose_checkpoints("saved", 4)
    experts = upit.expand_experts(experts, 8, "grown", base="base").experts
    seed_data = upit.seed_set(rows)
    buckets = upit.fill_buckets(upit.perplexities(experts, seed_data, tokenizer))
    routed = upit.init_routers(experts, seed_data, buckets, tokenizer, folder="routed")
    upit.assemble([one.folder for one in routed], [one.vectors for one in routed], "moe")

Experts are folders: whole models or LoRA adapters (`checkpoints` writes, `experts` reads, `models`
loads them). The steps: `expansion` with `pool` -> `buckets` -> `router`
with `vectors` -> `assembly` -> `mixtral`. From disk to disk, as the command line does it:
`folders`.
"""

from moe_runtime.methods.upit.assembly import assemble
from moe_runtime.methods.upit.buckets import fill_buckets, perplexities, seed_set
from moe_runtime.methods.upit.checkpoints import ExpertCheckpoints
from moe_runtime.methods.upit.expansion import Child, Expansion, expand_experts
from moe_runtime.methods.upit.experts import Expert, choose_checkpoints, open_expert, saved_experts
from moe_runtime.methods.upit.folders import export_mixtral
from moe_runtime.methods.upit.router import RoutedExpert, init_router, init_routers, load_routed
from moe_runtime.methods.upit.vectors import Measured

__all__ = [
    "Child",
    "Expansion",
    "Expert",
    "ExpertCheckpoints",
    "Measured",
    "RoutedExpert",
    "assemble",
    "choose_checkpoints",
    "expand_experts",
    "export_mixtral",
    "fill_buckets",
    "init_router",
    "init_routers",
    "load_routed",
    "open_expert",
    "perplexities",
    "saved_experts",
    "seed_set",
]
