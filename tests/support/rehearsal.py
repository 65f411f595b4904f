"""The bases and data sets of paper-size recipes as folders named by their ids: real model classes
and columns, reduced sizes, random weights, our own texts.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from moe_runtime.methods.prompts import MAGICODER

WORDS = "sum list sort word count text line odd prime first last number index key".split()
VOCAB = 480  # ids of a trained vocabulary, including bytes


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return distinct questions and answers."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        word = draw.choice(WORDS)
        question = f"Write a {word} of {draw.choice(WORDS)} {i}: {draw.randint(1, 99)} + {i}?"
        answer = f"def {word}(x):\n    return x + {i % 10}  # {{}}"
        found.append((question, answer))
    return found


TEXTS = [part for pair in pairs(200, 0) for part in pair] + [MAGICODER] * 9


def save_tokenizer(folder: Path, bos: str, eos: str, more: tuple[str, ...] = (), **values) -> int:
    """Write a byte-level BPE, which prepends BOS if it differs from EOS; return the number of
    ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=list(dict.fromkeys([bos, eos, *more])),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos != eos:
        template = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=special)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, **values
    )
    whole.save_pretrained(folder)
    return len(whole)


DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"
DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
# the strings in DeepSeek's model card for a chat
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n"
    "\n"
    "{% elif m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}{% else %}{{ "
    "m.content }}\n"
    "\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def save_base(folder: Path, ids: int, layers: int = 2, **config) -> None:
    """Write a random bfloat16 model of Llama's family, with some more ids than the tokenizer's."""
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "vocab_size": ids + 7,
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
    } | config
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):  # transformers initializes it to zeros
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def deepseek_coder(folder: Path) -> None:
    ids = save_tokenizer(folder, DEEPSEEK_BOS, DEEPSEEK_EOS, pad_token=DEEPSEEK_EOS)
    save_base(folder, ids, rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000)


def stablecode(folder: Path) -> None:
    ids = save_tokenizer(folder, "<|endoftext|>", "<|endoftext|>", unk_token="<|endoftext|>")
    save_base(
        folder,
        ids,
        model_type="stablelm",
        eos_token_id=0,
        rope_theta=1000000,
        partial_rotary_factor=0.25,
        use_qkv_bias=False,
        layer_norm_eps=1e-5,
    )


def llama(folder: Path, **config) -> None:
    save_base(folder, save_tokenizer(folder, "<s>", "</s>"), **config)


def deepseek_v2(folder: Path) -> None:
    ids = save_tokenizer(
        folder,
        DEEPSEEK_BOS,
        DEEPSEEK_EOS,
        pad_token=DEEPSEEK_EOS,
        chat_template=DEEPSEEK_TEMPLATE,
    )
    yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707}
    yarn |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": 64, "type": "yarn"}
    save_base(
        folder,
        ids,
        model_type="deepseek_v2",
        # attention
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope_scaling=yarn,
        rope_theta=10000,
        max_position_embeddings=2560,
        # routing
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        aux_loss_alpha=0.001,
        seq_aux=True,
    )


def of_13b(folder: Path, *more: str, **config) -> None:
    """Write a specialist of 13 billion parameters with its own tokens beyond Llama's."""
    padding = {"pad_token": more[0]} if len(more) == 1 else {}
    ids = save_tokenizer(folder, "<s>", "</s>", more, **padding)
    save_base(folder, ids, layers=1, vocab_size=ids, **config)


INFILLING = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
BASES = {
    "deepseek-ai/deepseek-coder-1.3b-base": deepseek_coder,
    "stabilityai/stable-code-3b": stablecode,
    "TinyLlama/TinyLlama_v1.1": lambda folder: llama(folder, hidden_size=64, num_attention_heads=4),
    "deepseek-ai/ESFT-vanilla-lite": deepseek_v2,
    "princeton-nlp/Sheared-LLaMA-2.7B": llama,
    "meta-llama/Llama-2-7b-hf": llama,
    "meta-llama/Llama-2-13b-hf": lambda folder: save_tokenizer(folder, "<s>", "</s>"),
    "openbmb/UltraLM-13b-v2.0": lambda folder: of_13b(folder, "<pad>"),
    "codellama/CodeLlama-13b-Instruct-hf": lambda folder: of_13b(
        folder, *INFILLING, rope_theta=1000000
    ),
    "WizardLMTeam/WizardMath-13B-V1.0": lambda folder: of_13b(folder, "[PAD]"),
}


def rows_of(name: str, count: int = 90) -> list[dict]:
    """Return examples with the columns of a published data set."""
    rows = []
    for i, (question, answer) in enumerate(pairs(count, sum(map(ord, name)))):
        if name.endswith("MetaMathQA"):
            row = {"type": "GSM", "query": question, "response": answer}
        elif name.endswith("SlimOrca"):
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            if i % 2 == 0:
                turns.insert(0, {"from": "system", "value": "Answer well."})
            row = {"conversations": turns}
        elif name.endswith("ultrachat_200k"):
            roles = ("user", "assistant") * 2
            texts = (question, answer, "And then?", "That is all.")
            messages = []
            for role, content in zip(roles, texts, strict=True):
                messages.append({"role": role, "content": content})
            row = {"prompt": question, "messages": messages}
        else:
            column = "response" if name.startswith("ise-uiuc/") else "output"
            row = {"instruction": question, column: answer, "source": "data/CoT/gsm_rft.json"}
        rows.append(row)
    return rows


# the file that `datasets` finds in the folder of each data set
FILES = {
    "ise-uiuc/Magicoder-Evol-Instruct-110K": "data-evol_instruct-decontaminated.jsonl",
    "WizardLMTeam/WizardLM_evol_instruct_70k": "alpaca_evol_instruct_70k.json",
    "theblackcat102/evol-codealpaca-v1": "train.jsonl",
    "meta-math/MetaMathQA": "MetaMathQA-395K.json",
    "Open-Orca/SlimOrca": "oo-labeled_correct.gpt4.sharegpt.jsonl",
    "TIGER-Lab/MathInstruct": "MathInstruct.json",
    "HuggingFaceH4/ultrachat_200k": "data/{split}-00000-of-00001-0123456789abcdef.parquet",
}


def save_data(root: Path, name: str) -> None:
    """Write a data set in the format of its published files."""
    from datasets import Dataset

    path = root / name / FILES.get(name, "")
    rows = rows_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        for split, part in {
            "train_sft": rows[:60],
            "test_sft": rows[60:],
            "train_gen": rows[:5],
            "test_gen": rows[:5],
        }.items():
            Dataset.from_list(part).to_parquet(str(path).format(split=split))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))


# at the paper's learning rates two steps are lost in bfloat16's rounding
SMALL = {"batch_size": 4, "per_device_batch_size": 2, "learning_rate": 1e-2}
SHORT = SMALL | {"steps": 2, "epochs": None, "warmup_steps": 0}
# reduces sizes, but none of the code paths of the recipes: engine, optimizer, schedule, precision,
# checkpointing, prompts
SIZES = {
    "xft": {
        "data__max_length": 160,
        "data__held_out_rows": 6,
        "data__limit": 12,
    },
    "esft": {"max_length": 64, "scores__n_tokens": 512},
    "upit": {"max_length": 64, "seed_data__at_least": 32},
    "ultrafuser": {"max_length": 128},
}
TRAININGS = {
    "xft": ("sft", "tune", "mix"),
    "esft": ("fft", "lora__training", "esft"),
    "upit": (),
    "ultrafuser": ("stage1", "stage2"),
}


def divided(recipe):
    """Return a recipe with its steps, batches and examples divided."""
    changes = SIZES[recipe.method] | {"evaluations": 1}
    short = SHORT
    if recipe.method == "ultrafuser":
        short = SHORT | {"batch_size": 6, "per_device_batch_size": 1}
    for training in TRAININGS[recipe.method]:
        changes |= {f"{training}__{name}": value for name, value in short.items()}
    for form in getattr(recipe, "forms", ()):
        for stage in ("sft", "init", "post"):
            changes |= {f"{form}__{stage}__{name}": value for name, value in SMALL.items()}
    paths = [f"tasks__{name}" for name in getattr(recipe, "tasks", ())]
    paths += [f"domains__{name}" for name in getattr(recipe, "domains", ())]
    if hasattr(recipe, "general"):
        paths.append("general")
    limit = 24 if recipe.method == "esft" else 12
    for path in paths:
        changes |= {f"{path}__held_out_rows": 6, f"{path}__limit": limit}
        if recipe.method == "esft":
            changes[f"{path}__validation_rows"] = 6
    return recipe.change(**changes)


def save_hub(root: Path, recipe) -> None:
    """Write what a recipe names: its bases, tokenizer and data, each below `root` under its id."""
    bases = [recipe.base_model, getattr(recipe, "tokenizer", None)]
    bases += [one.model for one in getattr(recipe, "specialists", {}).values()]
    for name in filter(None, bases):
        BASES[name](root / name)
    parts = [*getattr(recipe, "tasks", {}).values(), *getattr(recipe, "domains", {}).values()]
    for name in ("data", "general"):
        if hasattr(recipe, name) and hasattr(getattr(recipe, name), "sources"):
            parts.append(getattr(recipe, name))
    for name in {source for part in parts for source in part.sources}:
        save_data(root, name)
