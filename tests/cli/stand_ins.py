"""Stand-ins for work that takes long or needs a GPU, for tests of what commands write."""

import sysconfig
from pathlib import Path


class _Clock:
    """Milliseconds computed from the config's own numbers, the same in every run."""

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
    """Replace the measurements of `bench`, in this process, to test only what it writes."""
    from moe_runtime.bench import running
    from moe_runtime.bench.records import ABOUT

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
                extra_info=dict.fromkeys(ABOUT, "x")
                | {
                    "tiny": True,
                    "asked": 15,
                    "rounds": 1,
                    "ceilings": {},
                    "rows": {"moe_runtime": row},
                },
            )
            update(len(records.done()), len(names))
        return (0 if left else 5), ""

    running._pytest = measured


def fake_gpu() -> None:
    """Let `tune` find a GPU on which every config is correct at once, to test only its file."""
    import torch

    from moe_runtime.tools import tune

    tune.find_gpu = lambda: (torch.device("cpu"), _Clock())
    tune.runner = lambda *work: lambda tile: (torch.ones(1, 1),) * (3 if work[0] == "dz" else 1)
    tune.ROUNDS = 2
    tune.versions = lambda: {"date": "today"}
