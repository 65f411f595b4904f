"""The verbs that write a user's files, on tiny inputs."""

import sysconfig
from pathlib import Path
from typing import NamedTuple


class Verb(NamedTuple):
    """A command; {in} is the inputs' folder, and what it writes is `out`, below the folder that it
    runs in.
    """

    argv: tuple[str, ...]
    out: str = "out"
    whole: bool = True  # `out` appears at once, complete or absent; else the verb resumes there
    beside: tuple[str, ...] = ()  # what else it writes, beside `out`
    before: str = ""
    volatile: tuple[str, ...] = ()  # ends of the names of files whose bytes tell the time
    reads: str | None = None  # a file of its inputs without which it cannot do its work

    def arguments(self, inputs) -> list[str]:
        """Return the command line."""
        return [part.replace("{in}", str(inputs)) for part in self.argv]


def _verb(text: str, **more) -> Verb:
    return Verb(tuple(text.split()), **more)


WEIGHTS = "model.safetensors"
VERBS: dict[str, Verb] = {
    "demo": _verb(
        "papers demo --preset tiny --out out",
        beside=("out.stages",),
        volatile=("results.json", ".png"),
        before="tests.faults.verbs:short_demo",
    ),
    "xft upcycle": _verb(
        "xft upcycle {in}/dense out --num-experts 4 --top-k 2 --max-shard-size 50KB",
        reads=f"dense/{WEIGHTS}",
    ),
    "xft merge": _verb(
        "xft merge {in}/mergeable out --max-shard-size 50KB", reads=f"mergeable/{WEIGHTS}"
    ),
    "xft export": _verb(
        "xft export {in}/moe out --to official --keep-rope", reads=f"moe/{WEIGHTS}"
    ),
    "train": _verb(
        "train --model {in}/moe --data {in}/rows.jsonl --output_dir out --max_steps 4 "
        "--save_steps 2 --max_length 32 --per_device_train_batch_size 2 --logging_steps 1 --seed 3",
        whole=False,
        reads=f"moe/{WEIGHTS}",
    ),
    "stats": _verb(
        "stats {in}/moe --data {in}/rows.jsonl --out out --max-length 32",
        whole=False,
        reads=f"moe/{WEIGHTS}",
    ),
    "run": _verb(
        "papers run {in}/xft/study.yaml --out out",
        whole=False,
        reads=f"dense/{WEIGHTS}",
    ),
    "paper": _verb(
        "papers xft table1 --recipe {in}/xft/study.yaml --seeds 1 --out out",
        whole=False,
        reads=f"dense/{WEIGHTS}",
    ),
    "tune": _verb(
        "tune --model {in}/moe --tokens 16 --dtype float32 --out out",
        whole=False,
        before="tests.faults.verbs:fake_gpu",
    ),
    "bench": _verb(
        "bench --tiny --only merging --out out.json",
        out="out.json",
        whole=False,
        beside=("out.jsonl",),
        before="tests.faults.verbs:short_bench",
    ),
    "esft score": _verb(
        "esft score {in}/esft/base --data {in}/esft/sums.jsonl --n-tokens 64 --max-length 32 "
        "--out out --logs logs",
        beside=("logs",),
        reads=f"esft/base/{WEIGHTS}",
    ),
    "esft select": _verb(
        "esft select --summary {in}/esft/summary.json --p 0.4 --out out", reads="esft/summary.json"
    ),
    "esft train": _verb(
        "esft train {in}/esft/base --config {in}/esft/config.json --data {in}/esft/sums.jsonl "
        "--out out --steps 4 --save-steps 2 --learning-rate 1e-2 --batch-size 4 --max-length 32 "
        "--per-device-batch-size 4",
        beside=("out-checkpoints",),
        reads=f"esft/base/{WEIGHTS}",
    ),
    "esft merge": _verb(
        "esft merge {in}/esft/base {in}/esft/adapter out", reads=f"esft/base/{WEIGHTS}"
    ),
    "upit grow": _verb(
        "upit grow {in}/upit/saved/step-1 {in}/upit/saved/step-2 --count 3 --base {in}/upit/base "
        "--out out",
        whole=False,
        reads=f"upit/saved/step-2/{WEIGHTS}",
    ),
    "upit init-routers": _verb(
        "upit init-routers {in}/upit/saved/step-1 {in}/upit/saved/step-2 --data "
        "{in}/upit/sums.jsonl --base {in}/upit/base --out out --share 0.3 --at-least 4 --epochs 1 "
        "--batch-size 4 --max-length 32",
        whole=False,
        reads=f"upit/saved/step-2/{WEIGHTS}",
    ),
    "ultrafuser fuse": _verb(
        "ultrafuser fuse {in}/fuser/a {in}/fuser/b --copy --out out", reads=f"fuser/a/{WEIGHTS}"
    ),
    "ultrafuser train": _verb(
        "ultrafuser train --config {in}/fuser/mine.yaml --out out", whole=False
    ),
}

SLOW = {"demo", "paper", "ultrafuser train"}  # not in `make test`
QUICK = [name for name in VERBS if name not in SLOW]


class _Clock:
    """Milliseconds that a config's own numbers give, the same in every run."""

    def round(self, functions) -> list[float]:
        values = []
        for function in functions:
            values.append(float(sum(map(int, function.args[0]))))
        return values


def short_demo() -> None:
    """Let the demo read a part of the standard library and train for a few steps."""
    from papers import demo
    from papers.engine import corpora

    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for package in ("json", "email", "logging"):
        for path in sorted((root / package).glob("*.py")):
            files.append(path)
    texts = tuple(
        (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in files
    )
    corpora.standard_library_files = lambda: texts
    sizes = {}
    for stage in ("pretrain", "sft", "tune", "mix"):
        sizes[f"{stage}__batch_size"] = 2
    sizes |= {
        "pretrain__steps": 2,
        "sft__steps": 4,
        "tune__steps": 2,
        "mix__steps": 2,
        "pretrain__vocab_size": 300,
    }
    sizes |= {
        "data__held_out_rows": 4,
        "data__validation_rows": 2,
        "data__limit": 8,
    }
    recipe = demo.load_recipe("demo-tiny").change(**sizes)
    demo.load_recipe = lambda name: recipe


def short_bench() -> None:
    """Let `bench` measure nothing, in its own process: what is tested is what it keeps and
    writes.
    """
    from moe_runtime.bench import running

    def measured(arguments, records, update):
        done = records.done()
        names = ("bench_saved_memory[a-fp32]", "bench_x[b]")
        left = [name for name in names if name not in done]
        records.write("", planned=len(left))
        for name in left:
            records.write(name, began=True)
            row = {
                "ms": 1.5,
                "ratio": 1.0,
                "spread": 0.0,
                "saved KiB/token": 7.0,
            }
            records.write(
                name,
                extra_info={
                    "tiny": True,
                    "asked": 15,
                    "rounds": 1,
                    "rows": {"moe_runtime": row},
                },
            )
            update(len(records.done()), len(names))
        return (0 if left else 5), ""

    running._pytest = measured


def fake_gpu() -> None:
    """Let `tune` find a GPU on which each config gives the right result at once: what is tested is
    its file.
    """
    import torch

    from moe_runtime.tools import tune

    tune.find_gpu = lambda: (torch.device("cpu"), _Clock())
    tune.runner = lambda *work: lambda tile: (torch.ones(1, 1),) * (3 if work[0] == "dz" else 1)
    tune.ROUNDS = 2
    tune.versions = lambda: {"date": "today"}
