"""Shared by the tests of UpIT: a tokenizer, tiny models whose checkpoints are the experts, adapters
of one, two kinds of examples.
"""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import dense

ADAPTED = ("gate_proj", "up_proj", "down_proj")


def make_tokenizer():
    """Return a tokenizer with all bytes and almost no merges."""
    return train_tokenizer(["a text of some words"], 270)


def make_rows(count: int = 8, seed: int = 0, spread: int = 5) -> Dataset:
    """Return examples of `spread` different lengths with a prompt without labels: ids 10 to 39 or,
    in every second example, 200 to 229.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = {"input_ids": [], "labels": [], "domain": []}
    for i in range(count):
        length = 6 + i % spread
        low = 200 if i % 2 else 10
        ids = torch.randint(
            low,
            low + 30,
            (length,),
            generator=generator,
        ).tolist()
        columns["input_ids"].append(ids)
        columns["labels"].append([-100] * 3 + ids[3:])
        columns["domain"].append("odd" if i % 2 else "even")
    return Dataset.from_dict(columns)


def save_experts(folder: Path, tokenizer, count: int = 3, **settings) -> list[Path]:
    """Save a model and, as `count` experts, copies of it with noise on every tensor: FOLDER/base,
    FOLDER/expert-<i>.
    """
    settings = {"vocab_size": len(tokenizer), "mlp_bias": None} | settings
    model = dense(scale=3, **settings)
    folders = [
        folder / "base",
        *(folder / f"expert-{i}" for i in range(count)),
    ]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, path in enumerate(folders):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                noise = torch.randn(
                    tensor.shape,
                    generator=generator,
                ) * (0.05 * bool(seed))
                tensor.copy_(start[name] + noise.to(tensor.dtype))
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return folders[1:]


def save_adapters(
    folder: Path, base: Path, count: int = 3, targets=ADAPTED, rank: int = 2
) -> list[Path]:
    """Save `count` PEFT adapters for a model folder, with both halves random."""
    paths = [folder / f"adapter-{i}" for i in range(count)]
    for seed, path in enumerate(paths):
        model = AutoModelForCausalLM.from_pretrained(base)
        torch.manual_seed(seed)
        settings = LoraConfig(
            r=rank, lora_alpha=4, target_modules=list(targets), init_lora_weights=False
        )
        get_peft_model(model, settings).save_pretrained(path)
    return paths


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder, of a model or an adapter."""
    found = {}
    for file in sorted(folder.glob("*model*.safetensors")):
        found |= load_file(file)
    return found


def change(folder: Path, edit) -> None:
    """Apply `edit` to the tensors of a folder with one file."""
    file = next(folder.glob("*model*.safetensors"))
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
