"""The flags of `moe-runtime train`: TRL's own, a few beside them, and a file of them."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import is_torch_bf16_gpu_available

PROG = "moe-runtime train"
HELP = {
    "usage": f"{PROG} --model MODEL --data DATA --output_dir FOLDER [OPTIONS]",
    "description": (
        "Tune a model, dense or a mixture, with TRL's SFT command. The first options are ours, the others those of "
        "`trl sft`; --config FILE reads them from a YAML file, --json prints the result as one JSON object."
    ),
    "epilog": f"Example: {PROG} --model llama-1b-moe --data pairs.jsonl --output_dir tuned",
}


@dataclass
class TrainArguments:
    """What `moe-runtime train` has beyond TRL's own flags."""

    model: str | None = field(default=None, metadata={"help": "folder or Hub id; the same as --model_name_or_path"})
    data: str | None = field(
        default=None, metadata={"help": "a .jsonl, .json or .parquet file, a folder of them, or the id of a data set"}
    )
    eval_data: str | None = field(default=None, metadata={"help": "as --data, for --eval_strategy"})
    router_stats: bool = field(default=True, metadata={"help": "log the experts' load; router_stats.csv in output_dir"})
    stop_on_nan: bool = field(default=True, metadata={"help": "stop at a loss that is NaN or infinite"})


class _TakenBefore(argparse.Action):
    """A flag that stands in the help, and that somebody takes out of the words before this parser reads them."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is not for this place; want {self.option_strings[0]} once, on the command line")


def parse(trl, argv: Sequence[str] | None) -> tuple:
    """Parse flags and config file with TRL's parser; bf16 stays TRL's default only where the device has it.

    Raises ValueError for flags that nobody knows and for a config file that is none.
    """
    types = (TrainArguments, trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    parser = trl.TrlParser(types, prog=PROG, **HELP)
    others = parser.add_argument_group("beside them")
    hidden = {"action": _TakenBefore, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    others.add_argument("--config", metavar="FILE", help="a YAML file of these options; those given here win", **hidden)
    others.add_argument(
        "--json", nargs=0, help="print the result as one JSON object; all else goes to stderr", **hidden
    )
    if not is_torch_bf16_gpu_available():
        parser.set_defaults(bf16=False)
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True)
    if not sys.stderr.isatty():
        parser.set_defaults(disable_tqdm=True)  # few lines in its place
    argv = _with_config(list(sys.argv[1:] if argv is None else argv))
    with warnings.catch_warnings():
        # TRL's own default, by the name that transformers has given up
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        return parser.parse_args_and_config(argv)


def _with_config(argv: list[str]) -> list[str]:
    """Return the words with --config FILE as TRL knows it, in two; raise ValueError for a file of no options."""
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else (word,))]
    if "--config" not in argv:
        return argv
    path = Path(*argv[argv.index("--config") + 1 :][:1])
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"config is {str(path)!r}, which cannot be read: {reason}; want a YAML file of options"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(
            f"config is {str(path)!r}, which holds {type(values).__name__}; want options, a `name: value` each"
        )
    return argv
