"""The whole way of XFT on real text, in minutes on two cores: what `make demo` runs.

    standard library's source -> tokenizer, base model -> SFT, and XFT: upcycle -> tune -> learn mixing -> merge -> dense

SFT takes as many steps as tuning the mixture and learning to mix take together, on the same batches in the same order; the
merged model has SFT's size and speed. All numbers are means over the label tokens of functions from files that nothing was
trained on.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moe_runtime.config import check_choice
from moe_runtime.experiments.corpora import standard_library_pairs, standard_library_text
from moe_runtime.hf.dropin.stats import collect_router_stats
from moe_runtime.hf.models.tiny import small_llama, train_tokenizer
from moe_runtime.hf.training import fit as trainers
from moe_runtime.io import console
from moe_runtime.io.console import print_table
from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.io.rows import pack, require, tokenize_pairs
from moe_runtime.methods import xft


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sizes and steps of a demo."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_length: int
    base_steps: int
    base_batch: int
    rows: int
    steps: int
    batch: int
    mixing_steps: int
    held_out: int
    documents: int | None = None  # of the standard library, for the base
    base_rate: float = 1e-3
    rate: float = 7e-4
    mixing_rate: float = 1e-2
    num_experts: int = 8
    top_k: int = 6
    shared_rate: float = 0.5


PRESETS = {
    # few rows and eight epochs: where a tuned model begins to learn its rows by heart, and an average of experts less so
    "small": Preset(
        vocab_size=2048, hidden_size=160, intermediate_size=432, num_layers=3, max_length=160, base_steps=300,
        base_batch=32, rows=480, steps=240, batch=16, mixing_steps=30, held_out=256,
    ),
    "tiny": Preset(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, max_length=128, base_steps=20,
        base_batch=8, rows=64, steps=12, batch=8, mixing_steps=4, held_out=24, documents=400,
    ),
}  # fmt: skip


@dataclass
class Row:
    """One line of the table."""

    model: str
    loss: float
    parameters: int
    active: int
    seconds: float
    note: str

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


class Demo:
    """The stages in order; each prints what it does and leaves what the next one needs."""

    def __init__(self, preset: Preset, seed: int):
        self.preset, self.seed = preset, seed
        self.rows: list[Row] = []
        self.histories: dict[str, trainers.History] = {}
        self.start = time.perf_counter()

    def read(self) -> None:
        """Read the rows, and train the tokenizer on them."""
        p = self.preset
        self.say("reading the standard library of this Python")
        pairs = standard_library_pairs(seed=self.seed)
        documents = standard_library_text()
        if p.documents is not None:
            documents = documents[:: max(len(documents) // p.documents, 1)][: p.documents]
        self.tokenizer = train_tokenizer(documents, p.vocab_size)
        self.blocks = pack(self.tokenizer, documents, p.max_length)
        # twice as many as asked for, since rows whose answer lies beyond max_length are dropped
        self.train_rows, self.held_out = (
            first(tokenize_pairs(self.tokenizer, rows[: 2 * count], p.max_length), count)
            for rows, count in ((pairs.train, p.rows), (pairs.held_out, p.held_out))
        )
        prompts = (row["prompt"] for row in pairs.held_out)
        self.prompt = next(prompt for prompt in prompts if len(self.tokenizer(prompt).input_ids) < p.max_length)
        self.say(
            f"{len(self.blocks):,} blocks of {p.max_length} tokens to pre-train on, {len(self.train_rows):,} documented "
            f"functions to tune on for {p.steps * p.batch / len(self.train_rows):.0f} epochs, {len(self.held_out)} from "
            f"other files held out; vocabulary {len(self.tokenizer):,}"
        )

    def pretrain(self) -> None:
        """Pre-train the dense base on source text."""
        p = self.preset
        self.base = small_llama(
            self.tokenizer, hidden_size=p.hidden_size, intermediate_size=p.intermediate_size, num_layers=p.num_layers,
            max_length=p.max_length, seed=self.seed,
        )  # fmt: skip
        seconds = self.fit("base", self.base, self.blocks, p.base_steps, p.base_rate, p.base_batch)
        self.add("base", self.base, seconds, "pre-trained on source text")

    def sft(self) -> None:
        """Tune the base as it is, for the steps that XFT takes in all: the baseline."""
        p = self.preset
        self.dense = clone(self.base)
        seconds = self.fit("SFT", self.dense, self.train_rows, p.steps + p.mixing_steps, p.rate, p.batch)
        self.add("SFT", self.dense, seconds, "the dense model, tuned")

    def upcycle(self) -> None:
        """Upcycle the base, tune the mixture, and count what its routers choose."""
        p = self.preset
        self.moe = clone(self.base)
        self.receipt = xft.upcycle(self.moe, num_experts=p.num_experts, top_k=p.top_k, seed=self.seed + 42)
        self.say(str(self.receipt).replace("\n", "\n  "))
        seconds = self.fit("MoE", self.moe, self.train_rows, p.steps, p.rate, p.batch)
        self.add("MoE", self.moe, seconds, f"XFT: {p.num_experts} experts, {p.top_k} per token, tuned")
        batches = [
            {"input_ids": torch.tensor([row["input_ids"]], device=self.moe.device)} for row in first(self.held_out, 64)
        ]
        self.stats = collect_router_stats(self.moe, batches)

    def merge(self) -> None:
        """Learn the mixing coefficients and merge to a dense model."""
        p = self.preset
        before = self.rows[-1].seconds
        self.mergeable = xft.to_mergeable(clone(self.moe), shared_rate=p.shared_rate)
        self.add("merged INIT", self.mergeable, before, f"lambda {p.shared_rate}, mixing not trained", dense=True)
        seconds = self.fit("mixing", self.mergeable, self.train_rows, p.mixing_steps, p.mixing_rate, p.batch)
        self.alpha = xft.mixing_coefficients(self.mergeable)
        self.merged = xft.merge(self.mergeable)
        self.add("merged", self.merged, before + seconds, f"lambda {p.shared_rate}, mixing learned: the result")

    def fit(self, name: str, model, rows, steps: int, rate: float, batch: int) -> float:
        """Train a model in place; return the seconds that it took."""
        with console.bar(name) as on_step:
            history = trainers.fit(
                model, rows, self.tokenizer, steps=steps, learning_rate=rate, batch_size=batch, held_out=self.held_out,
                eval_every=max(steps // 4, 1), seed=self.seed, on_step=on_step,
            )  # fmt: skip
        self.histories[name] = history
        self.say(f"{name}: {steps} steps in {history.seconds:.0f} s, held-out loss {history.held_out[-1][1]:.4f}")
        return history.seconds

    def add(self, name: str, model, seconds: float, note: str, dense: bool = False) -> None:
        """Add a model to the table; `dense` counts it as large as the base, which it will be merged to."""
        total = sum(p.numel() for p in model.parameters())
        active = total
        if name == "MoE":
            active = self.receipt.active_parameters
        if dense:
            total = active = self.rows[0].parameters
        loss = trainers.held_out_loss(model, self.held_out, self.tokenizer)
        self.rows.append(Row(name, loss, total, active, seconds, note))

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)


def run(preset: str, out: str | Path, seed: int = 0, overwrite: bool = False) -> list[Row]:
    """Run the demo and write its models, results.json and xft.png to the folder `out`; return the table's rows."""
    check_choice("preset", preset, tuple(PRESETS))
    out = check_out_dir(out, overwrite)
    for module, extra in (
        ("accelerate", "train"),
        ("datasets", "train"),
        ("tokenizers", "train"),
        ("matplotlib", "plot"),
    ):
        require(module, extra)  # now, not after minutes of training
    demo = Demo(PRESETS[preset], seed)
    trainers.quiet()
    with atomic_folder(out, overwrite) as folder:
        demo.read()
        demo.pretrain()
        xft.save_dense(demo.base, folder / "base", demo.tokenizer)
        demo.sft()
        xft.save_dense(demo.dense, folder / "sft", demo.tokenizer)
        demo.upcycle()
        demo.moe.save_pretrained(folder / "moe")
        demo.tokenizer.save_pretrained(folder / "moe")
        demo.merge()
        xft.save_dense(demo.merged, folder / "merged", demo.tokenizer)
        (folder / "results.json").write_text(json.dumps(results(demo), indent=2) + "\n", encoding="utf-8")
        picture(demo, folder / "xft.png")
    show(demo, out)
    return demo.rows


def first(rows, count: int):
    """Return the first `count` rows, or all if there are fewer."""
    return rows.select(range(min(count, len(rows))))


def clone(model):
    """Return an independent copy of the model."""
    import copy

    return copy.deepcopy(model)


def results(demo: Demo) -> dict:
    """Return everything the table and the picture show, JSON-ready."""
    return {
        "preset": asdict(demo.preset),
        "seed": demo.seed,
        "rows": [asdict(row) | {"perplexity": row.perplexity} for row in demo.rows],
        "upcycled_error": demo.receipt.error,
        "alpha": demo.alpha.tolist(),
        "expert_slots": demo.stats.counts.tolist(),
        "held_out_curves": {name: history.held_out for name, history in demo.histories.items()},
        "torch": torch.__version__,
    }


def picture(demo: Demo, path: Path) -> None:
    """Draw held-out losses, router load and learned mixing into one PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    losses, load, mixing = figure.subplots(1, 3)
    for name in ("SFT", "MoE"):
        steps, values = zip(*[(0, demo.rows[0].loss), *demo.histories[name].held_out], strict=True)
        losses.plot(steps, values, marker="o", label=name)
    for row, style in zip(demo.rows[3:], (":", "--"), strict=True):
        losses.axhline(row.loss, linestyle=style, color="black", label=row.model)
    losses.set(xlabel="step", ylabel="held-out loss", title="held-out loss (lower is better)")
    losses.legend()
    demo.stats.heatmap(load)
    normal = demo.alpha[:, 1:]
    image = mixing.imshow(normal.numpy(), aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=mixing, label="alpha")
    mixing.set_xticks(range(normal.shape[1]), range(1, normal.shape[1] + 1))
    mixing.set_yticks(range(normal.shape[0]))
    mixing.set(
        xlabel="expert",
        ylabel="layer",
        title=f"learned mixing of the normal experts (shared: {demo.preset.shared_rate})",
    )
    figure.savefig(path, dpi=120)


def show(demo: Demo, out: Path) -> None:
    """Print the table and what it says."""
    columns = ("model", "left"), ("loss", "right"), ("perplexity", "right"), ("parameters", "right")
    columns += ("per token", "right"), ("train s", "right"), ("", "left")
    rows = [
        (
            row.model,
            f"{row.loss:.4f}",
            f"{row.perplexity:.2f}",
            f"{row.parameters:,}",
            f"{row.active:,}",
            f"{row.seconds:.0f}",
            row.note,
        )
        for row in demo.rows
    ]
    print_table("held-out functions of the standard library", columns, rows)
    print(verdict(demo))
    print(
        f"The mixture kept the base's function when it was made: relative error {demo.receipt.error:.1e}.\n"
        f"dense model: {out / 'merged'}   AutoModelForCausalLM.from_pretrained({str(out / 'merged')!r}) loads it\n"
        f"picture: {out / 'xft.png'}   numbers: {out / 'results.json'}"
    )
    text = trainers.complete(demo.merged, demo.tokenizer, demo.prompt)
    print(f"\nIt was asked:\n{_indent(demo.prompt)}\nand wrote:\n{_indent(text)}")


def verdict(demo: Demo) -> str:
    """Say in sentences what XFT gained or lost here, against the SFT that the table shows and against the best one."""
    by_name = {row.model: row for row in demo.rows}
    sft, merged = by_name["SFT"].loss, by_name["merged"].loss
    gain = sft - merged
    gained = (
        f"lower than SFT's by {gain:.4f}" if gain > 0 else f"higher than SFT's by {-gain:.4f}: XFT did not pay here"
    )
    text = f"The merged model has the size and the speed of SFT's, and a held-out loss that is {gained}."
    step, best = min(demo.histories["SFT"].held_out, key=lambda point: point[1])
    if best < min(sft, merged):
        text += (
            f"\nSFT was best at step {step}, with {best:.4f}: from there on both learn their rows by heart, and the average "
            "of the experts takes part of that back."
        )
    return text


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
