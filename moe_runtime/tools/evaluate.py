"""Evaluates any folder of ours with lm-eval, whose tasks, options and tables these are.

FOLDER         a model, dense or MoE, stock or upcycled; MoE layers run on moe_runtime
FOLDER         a PEFT adapter on the base that its adapter_config.json names
BASE+FOLDER    an ESFT adapter (expert_cfg.json) or a PEFT adapter on a base
"""

import contextlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from moe_runtime.hf.common.sources import check_source
from moe_runtime.hf.dropin.experts import patch
from moe_runtime.hf.training import ranks
from moe_runtime.io.files import read_json
from moe_runtime.io.rows import require
from moe_runtime.methods.esft import adapters
from moe_runtime.methods.lora.baseline import load_lora

ESFT = "expert_cfg.json"
PEFT = "adapter_config.json"
FUSED = "fuser_config.json"
# of simple_evaluate, in the order of lm-eval's --seed
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


class Source(NamedTuple):
    """A model, and the folder of an adapter on it."""

    base: str
    adapter: Path | None = None

    def load(self, dtype: str) -> nn.Module:
        """Load the model with its adapter."""
        model = ranks.load_model(self.base, dtype, name="model")
        if self.adapter is None:
            return model
        if (self.adapter / ESFT).is_file():
            adapters.apply(model, self.adapter)
            return model
        return load_lora(model, self.adapter)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the adapter's tokenizer, or the base's if the adapter has none."""
        folder = self.base
        if self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file():
            folder = str(self.adapter)
        return ranks.load_tokenizer(folder, "tokenizer")


def find(word: str) -> Source:
    """Parse FOLDER or BASE+FOLDER; raises ValueError for what is neither a model nor an adapter."""
    base, plus, folder = word.partition("+")
    if os.path.exists(word) or not plus:
        base = None
        folder = word
    path = Path(folder)
    if (path / FUSED).is_file():
        raise ValueError(f"{word!r} is a fused folder, which lm-eval's models cannot hold")
    is_adapter = (path / ESFT).is_file() or (path / PEFT).is_file()
    if base is not None and not is_adapter:
        raise ValueError(f"Adapter {folder!r} has neither {ESFT} nor {PEFT}")
    if not is_adapter or (base is None and (path / "config.json").is_file()):
        check_source(folder)
        return Source(folder)
    if base is None and (path / PEFT).is_file():
        base = read_json(path / PEFT).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{word!r} is an adapter. Pass it with its base, as in BASE+{folder}")
    check_source(base, "base")
    return Source(base, path)


def evaluate(word: str, arguments: Sequence[str]) -> dict:
    """Evaluate a model with the options of `lm-eval run`; print lm-eval's tables.

    Args:
        word: FOLDER, Hub id or BASE+ADAPTER.
        arguments: Words such as --tasks gsm8k --num_fewshot 5. --model_args dtype=bfloat16 loads
            the model in that dtype; other model_args are those of lm-eval's HFLM.

    Returns:
        The results of lm_eval.simple_evaluate.
    """
    require("lm_eval", "eval")
    from lm_eval import simple_evaluate
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    config = EvaluatorConfig.from_cli(HarnessCLI()._parser.parse_args(["run", *arguments]))
    source = find(word)
    tasks = config.process_tasks(config.metadata)  # before a model is loaded in vain
    model_args = dict(config.model_args)
    model = source.load(model_args.pop("dtype", "auto"))
    with contextlib.suppress(ValueError):  # dense: there is nothing to speed up
        patch(model)
    device = config.device if torch.cuda.is_available() else "cpu"
    lm = HFLM(
        model.to(device).eval(),
        backend="causal",
        tokenizer=source.tokenizer(),
        batch_size=config.batch_size,
        max_batch_size=config.max_batch_size,
        **model_args,
    )

    options = {}
    for name in inspect.signature(simple_evaluate).parameters:
        if hasattr(config, name):
            options[name] = getattr(config, name)
    options |= {"model": lm, "model_args": {"pretrained": word}, "task_manager": tasks}
    if config.seed:
        options |= dict(zip(SEEDS, config.seed, strict=True))
    options |= config.cache_requests or {"cache_requests": False}
    tracker = EvaluationTracker(output_path=config.output_path)
    results = simple_evaluate(**options, evaluation_tracker=tracker)
    samples = results.pop("samples", None)
    tracker.save_results_aggregated(results, samples)
    for task in results["configs"] if config.log_samples else ():
        tracker.save_results_samples(task_name=task, samples=samples[task])
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    return results["results"]
