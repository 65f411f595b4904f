"""Run the bash blocks of the README and docs/ page by page: in order, in one folder, on models and
texts that take seconds.

FLOWS defines for each page what its folder contains beforehand and what is made smaller; NOT_RUN
lists what cannot run here.
"""

import contextlib
import glob
import importlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.fences import ALL, ROOT, Fence, run_cli, statements


class Flow(NamedTuple):
    """What a page's commands find in their folder, and replacements that make them smaller."""

    prepare: tuple[Callable[[Path], None], ...] = ()
    smaller: dict[str, str] = {}


NETWORK = "fetches packages or models"
# prefixes of commands, and why these are not run here
NOT_RUN = {
    "make demo": "fills a .venv, and takes minutes",
    "make demo-real": "fills a .venv, and takes minutes",
    "make test": "is the suite that this belongs to",
    "make test-slow": "is the rest of the suite",
    "make test-all": "is both",
    "make test-avx2": "is a part of the suite",
    "make test-aot": "is a part of the suite",
    "make stress": "is the suite's longer form",
    "make test-emulated": "is a part of the suite's longer form",
    "python -m tests.support.planted": "runs parts of the suite, once for each bug",
    "vllm serve": "starts a server of another package",
    "make lint": "is of the developers' .venv",
    "make bench": "takes an hour",
    "make docs": "is of the developers' .venv",
    "make wheel": "fills a .venv",
    "make wheel-cuda": "fills a .venv, and compiles for minutes",
    "pip wheel": NETWORK,
    "pip install": NETWORK,
    "export CXX=": "names a compiler of another package",
    ".ci/run": "calls make lint and make test",
    ".venv/bin/pre-commit": "changes the clone's git hooks",
    "bash bench/gpu.sh": "wants a GPU",
    "accelerate launch": "wants several GPUs",
    "python -m moe_runtime.native.build cuda": "compiles for minutes",
    "torchrun": "wants several nodes",
    "python examples/lora.py": "is run by tests/docs/test_examples.py",
    "moe-runtime memory": NETWORK,
    "moe-runtime eval": NETWORK,
    "moe-runtime tune": "needs a GPU",
    "python -m papers data smollm2": "reads a package of 93 MB",
}
# pages whose commands depend on one of NOT_RUN
PAGES_NOT_RUN = {"docs/papers/real-model.md"}


def rows(path: Path, count: int = 16) -> None:
    """Write pairs of a question and an answer."""
    values = []
    for i in range(count):
        values.append(
            {
                "prompt": f"{i} and {i % 7} make ",
                "completion": str(i + i % 7),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in values))


def base(folder: Path) -> None:
    """Create a dense model and pairs."""
    from tests.hf.dropin.test_layers import TOKENIZER
    from tests.hf.tiny import dense

    dense(
        "llama",
        vocab_size=len(TOKENIZER),
        mlp_bias=False,
    ).save_pretrained(folder / "base")
    TOKENIZER.save_pretrained(folder / "base")
    rows(folder / "pairs.jsonl")


def benchmarks(folder: Path) -> None:
    """Write examples, one of which contains a benchmark's text."""
    rows(folder / "rows.jsonl")
    (folder / "humaneval.jsonl").write_text(
        json.dumps({"task_id": "0", "prompt": "nothing of these rows"}) + "\n"
    )
    (folder / "gsm8k-test.jsonl").write_text(
        json.dumps(
            {
                "question": "so 3 and 3 and nothing else make ",
                "answer": "6",
            }
        )
        + "\n"
    )


def law(folder: Path) -> None:
    """Create a stock MoE model and a task's texts."""
    from tests.hf.dropin.test_layers import TOKENIZER, stock

    stock().save_pretrained(folder / "olmoe")
    TOKENIZER.save_pretrained(folder / "olmoe")
    rows(folder / "law.jsonl")
    rows(folder / "law-test.jsonl", 6)


def peft_adapters(folder: Path) -> None:
    """Create a stock model and an adapter for it, as written by current PEFT and by 0.18."""
    from tests.support.peft_adapter import adapted, as_written_by

    adapted(folder, modules=("q_proj", "v_proj"))
    (folder / "base").rename(folder / "olmoe")
    as_written_by(
        "0.18.0",
        folder / "adapter",
        folder / "old-adapter",
        transposed=False,
    )


def checkpoints(folder: Path) -> None:
    """Create a base without biases in its MLPs, four checkpoints of its tuning, and examples."""
    import torch

    from tests.hf.dropin.test_layers import TOKENIZER
    from tests.hf.tiny import dense

    model = dense("llama", vocab_size=len(TOKENIZER), mlp_bias=False)
    for place in ("llama", *(f"runs/sft/step-{step}" for step in (100, 200, 300, 400))):
        model.save_pretrained(folder / place)
        TOKENIZER.save_pretrained(folder / place)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    rows(folder / "rows.jsonl", 64)


def specialists(folder: Path) -> None:
    """Create two specialists, the examples of their domains, and the page's own mine.yaml."""
    from tests.methods.ultrafuser import fusers

    for name, model in zip(
        ("law", "code"),
        fusers.specialists(2),
        strict=True,
    ):
        model.save_pretrained(folder / "models" / name)
        fusers.tokenizer().save_pretrained(folder / "models" / name)
    for name, count in (("law", 12), ("code", 12), ("code-test", 4)):
        pairs = []
        for i in range(count):
            pairs.append({"prompt": f"{name} {i}", "completion": f"{i + 1}"})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (own,) = (
        fence
        for fence in ALL
        if fence.page == "docs/papers/ultrafuser-tables.md" and fence.language == "yaml"
    )
    text = replaced(
        own.text,
        {
            "held_out_rows: 256": "held_out_rows: 4",
            "steps: 4000,": "steps: 2,",
            "steps: 400,": "steps: 2,",
            "128, per_device_batch_size: 8": "4, per_device_batch_size: 4",
            "64, per_device_batch_size: 8": "4, per_device_batch_size: 4",
        },
    )
    (folder / "mine.yaml").write_text(text)


def evaluated(folder: Path) -> None:
    """Create a model of every kind, and a file of each kind of problem."""
    from tests.papers.evaluation import test_evaluate as files

    files.make_folders(folder)
    for old, new in {
        "dense": ("llama", "base", "sft", "merged", "models/code", "models/sums"),
        "moe": ("llama-moe", "tuned"),
        "mixtral": ("olmoe",),
        "esft": ("law/adapter",),
        "peft": ("lora-adapter",),
    }.items():
        for name in new:
            shutil.copytree(folder / old, folder / name)
    (own,) = (
        fence for fence in ALL if fence.page == "docs/evaluation.md" and fence.language == "yaml"
    )
    (folder / "smoke.yaml").write_text(own.text)
    lines = {
        "gsm8k-test": {"question": "1 + 1?", "answer": "#### 2"},
        "intent": {"prompt": "On?", "raw_answers": ["{}"]},
        "smoke": {"question": "Is it?", "label": 1},
        "mbpp": files.MBPP,
        "humaneval": files.CODE,
    }
    for name, row in lines.items():
        files.write(folder / f"{name}.jsonl", [row] * 3)


def study(method: str, **changes) -> Callable[[Path], None]:
    """Return a function that writes a method's small study: METHOD/study.yaml."""

    def write(folder: Path) -> None:
        (folder / method).mkdir()
        importlib.import_module(f"tests.support.{method}_study").write_study(
            folder / method, **changes
        )

    return write


def small_table(command: str, folder: str) -> dict[str, str]:
    """Return options that make a paper's table small: one seed of the study in a folder."""
    return {
        f"papers {command} --seeds 3": f"papers {command} --seeds 1 --recipe {folder}/study.yaml"
    }


def mine(folder: Path) -> None:
    """Save the study as a custom recipe."""
    (study,) = folder.glob("*/study.yaml")
    shutil.copy(study, folder / "mine.yaml")


def theirs(folder: Path) -> None:
    """Write a folder of the released XFT code."""
    from tests.support import official_xft

    official_xft.write_moe(folder / "THEIRS")


def results(folder: Path) -> None:
    """Copy the latest results of a CPU to the names on the page."""
    newest = max((ROOT / "bench" / "results").glob("*-cpu.json"))
    (folder / "bench" / "results").mkdir(parents=True)
    for name in ("A.json", "B.json", f"bench/results/{newest.name}"):
        shutil.copy(newest, folder / name)


def library(folder: Path) -> None:
    """Create a file that looks like a CUDA library built for the Hub."""
    (folder / "LIBRARY").write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.17\0")


def shrinkable(folder: Path) -> None:
    """Create two stock MoE models and texts."""
    from tests.hf.dropin.test_layers import TOKENIZER
    from tests.support.stock_moe import stock

    for name, family in (("olmoe", "olmoe"), ("qwen3-moe", "qwen3_moe")):
        stock(family, vocab_size=len(TOKENIZER)).save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    rows(folder / "text.jsonl")
    rows(folder / "held-out.jsonl", 4)


FLOWS = {
    "docs/benchmarks.md": Flow(
        (results,),
        {
            "--only layer,step": "--only merging --tiny",
            "bench --tiny": "bench --tiny --only merging",
        },
    ),
    "docs/commands.md": Flow(),
    "docs/cpu.md": Flow(),
    "docs/data.md": Flow((benchmarks,)),
    "docs/esft.md": Flow(
        (law, study("esft")),
        {"esft train": "esft train --steps 2 --batch-size 4"} | small_table("esft main", "esft"),
    ),
    "docs/papers/esft-tables.md": Flow(
        (study("esft"), mine),
        {
            "--seeds 1": "--seeds 1 --recipe esft/study.yaml",
            "esft main": "esft counts --seeds 1",
        },
    ),
    "docs/evaluation.md": Flow(
        (evaluated,),
        {
            "arithmetic": "arithmetic=gsm8k-test.jsonl",
            "humaneval": "humaneval=humaneval.jsonl",
            "--out runs/": "--max-new-tokens 4 --out runs/",
        },
    ),
    "docs/performance.md": Flow(
        smaller={"--only layer,step": "--only merging --tiny --out bench.json"}
    ),
    "docs/papers/recipes.md": Flow(
        (study("xft"),),
        {"run tiny": "run xft/study.yaml"},
    ),
    "docs/serving.md": Flow((peft_adapters, base)),
    "docs/shrink.md": Flow(
        (shrinkable,), {"--keep 48": "--keep 4", "--train_on all": "--train_on all --max_steps 1"}
    ),
    "docs/start.md": Flow(),
    "docs/troubleshooting.md": Flow(),
    "docs/papers/ultrafuser-tables.md": Flow(
        (specialists, study("fuser")),
        {"weights --seeds 1": "weights --seeds 1 --recipe fuser/study.yaml"},
    ),
    "docs/ultrafuser.md": Flow(
        (specialists, study("fuser")), small_table("ultrafuser ablate", "fuser")
    ),
    "docs/papers/upit-tables.md": Flow(
        (study("upit"), mine), {"main --seeds 1": "main --seeds 1 --recipe upit/study.yaml"}
    ),
    "docs/upit.md": Flow(
        (checkpoints, study("upit")),
        small_table("upit main", "upit"),
    ),
    "docs/papers/xft-official.md": Flow((theirs,)),
    "docs/papers/xft-tables.md": Flow(
        (study("xft"), mine), {"--preset deepseek-coder-1.3b": "--recipe mine.yaml"}
    ),
    "docs/xft.md": Flow(
        (base, study("xft")),
        small_table("xft table1", "xft"),
    ),
    "README.md": Flow(),
}


def replaced(text: str, smaller: dict[str, str]) -> str:
    """Replace each of the given texts; raise ValueError if one is missing."""
    for old, new in smaller.items():
        if old not in text:
            raise ValueError(f"{old!r} is not in the page; use text from the page")
        text = text.replace(old, new)
    return text


def commands(page: str) -> list[tuple[Fence, list[str]]]:
    """Return the commands of a page's bash blocks, in order, each with its block, after FLOWS's
    replacements.
    """
    fences = []
    for fence in ALL:
        if fence.page == page and fence.language == "bash":
            fences.append(fence)
    smaller = FLOWS[page].smaller if page in FLOWS else {}
    texts = replaced(
        "\0".join(re.sub(r" {2,}", " ", fence.text) for fence in fences), smaller
    ).split("\0")
    return [(fence, words) for fence, text in zip(fences, texts) for words in statements(text)]


def reason_of(words: list[str]) -> str | None:
    """Return the key of NOT_RUN that applies to a command; None if it runs."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    line = " ".join(words)
    for key in sorted(NOT_RUN, key=len, reverse=True):
        if line == key or line.startswith(key if key.endswith("=") else f"{key} "):
            return key
    return None


def wants_a_compiler(words: list[str]) -> bool:
    """Whether a command needs a compiler that this machine does not have."""
    has_one = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return "moe_runtime.native.build cpu" in words and not has_one


def run(words: list[str], monkeypatch) -> str:
    """Run a command in this process, with file patterns expanded; return its output. Asserts that
    it succeeds.
    """
    words = [
        name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    if words[0] == "moe-runtime" or words[:3] == ["python", "-m", "papers"]:
        code, out, err = run_cli(words, monkeypatch)
    else:
        assert words[:2] == ["python", "-m"], words
        out = io.StringIO()
        err = io.StringIO()
        monkeypatch.setattr(sys, "argv", words[2:])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(words[2]).main(words[3:])
        out = out.getvalue()
        err = err.getvalue()
    assert not code, f"{' '.join(words)} ended with {code}: {out[-1000:]}{err[-3000:]}"
    return out
