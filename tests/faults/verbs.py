"""The verbs that write a user's files, on tiny inputs."""

from typing import NamedTuple


class Verb(NamedTuple):
    """A command; {in} stands for the inputs' folder, and `out` is its output, relative to the
    folder that it runs in.
    """

    argv: tuple[str, ...]
    out: str = "out"
    whole: bool = True  # `out` is written atomically; otherwise the verb resumes there
    beside: tuple[str, ...] = ()  # other output, in addition to `out`
    before: str = ""  # module:function to call first

    def arguments(self, inputs) -> list[str]:
        """Return the command line."""
        return [part.replace("{in}", str(inputs)) for part in self.argv]


def _verb(text: str, **more) -> Verb:
    return Verb(tuple(text.split()), **more)


VERBS: dict[str, Verb] = {
    "xft upcycle": _verb(
        "xft upcycle {in}/dense out --num-experts 4 --top-k 2 --max-shard-size 50KB"
    ),
    "xft merge": _verb("xft merge {in}/mergeable out --max-shard-size 50KB"),
    "xft export": _verb("xft export {in}/moe out --to official --keep-rope"),
    "train": _verb(
        "train --model {in}/moe --data {in}/rows.jsonl --output_dir out --max_steps 4 "
        "--save_steps 2 --max_length 32 --per_device_train_batch_size 2 --logging_steps 1 --seed 3",
        whole=False,
    ),
    "stats": _verb("stats {in}/moe --data {in}/rows.jsonl --out out --max-length 32", whole=False),
    "run": _verb("papers run {in}/xft/study.yaml --out out", whole=False),
    "esft score": _verb(
        "esft score {in}/esft/base --data {in}/esft/sums.jsonl --tokens 64 --max-length 32 "
        "--out out",
    ),
    "esft select": _verb("esft select --summary {in}/esft/summary.json --p 0.4 --out out"),
    "esft train": _verb(
        "esft train {in}/esft/base --config {in}/esft/config.json --data {in}/esft/sums.jsonl "
        "--out out --steps 4 --save-steps 2 --learning-rate 1e-2 --batch-size 4 --max-length 32 "
        "--per-device-batch-size 4",
        beside=("out-checkpoints",),
    ),
    "esft merge": _verb("esft merge {in}/esft/base {in}/esft/adapter out"),
    "upit grow": _verb(
        "upit grow {in}/upit/saved/step-1 {in}/upit/saved/step-2 --count 3 --base {in}/upit/base "
        "--out out",
        whole=False,
    ),
    "upit init-routers": _verb(
        "upit init-routers {in}/upit/saved/step-1 {in}/upit/saved/step-2 --data "
        "{in}/upit/sums.jsonl --base {in}/upit/base --out out --share 0.3 --at-least 4 --epochs 1 "
        "--batch-size 4 --max-length 32",
        whole=False,
    ),
    "ultrafuser fuse": _verb("ultrafuser fuse {in}/fuser/a {in}/fuser/b --copy --out out"),
    "ultrafuser train": _verb(
        "ultrafuser train --config {in}/fuser/mine.yaml --out out", whole=False
    ),
}

QUICK = [name for name in VERBS if name != "ultrafuser train"]  # the ones that `make test` runs
