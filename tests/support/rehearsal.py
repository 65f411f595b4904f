"""The bases and data sets of paper-size recipes, as folders of their ids: real classes and file
forms, all sizes divided.

Configs and tokenizers have the keys and special tokens that the model cards show; weights are
random, texts are ours.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime.methods.prompts import MAGICODER

WORDS = [
    "sum",
    "list",
    "sort",
    "word",
    "count",
    "text",
    "line",
    "odd",
    "prime",
    "first",
    "last",
    "number",
    "index",
    "key",
]
VOCAB = 480  # ids of a trained vocabulary, bytes included


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions and answers, all different."""
    draw = random.Random(seed)
    asked = set()
    for i in range(count):
        words = f"{draw.choice(WORDS)} of {draw.choice(WORDS)}"
        asked.add(f"Write a {words} {i}: {draw.randint(1, 99)} + {i}?")
    return [
        (question, f"def {question.split()[2]}(x):\n    return x + {i % 10}  # {{}}")
        for i, question in enumerate(sorted(asked))
    ]


TEXTS = [part for pair in pairs(200, 0) for part in pair] + [MAGICODER] * 9


def tokenizer_file(folder: Path, tokenizer: Tokenizer, values: dict) -> int:
    """Write tokenizer.json and tokenizer_config.json; return how many ids there are."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(values | {"clean_up_tokenization_spaces": False})
    )
    return tokenizer.get_vocab_size()


def byte_level(special: list[str], first: bool = True, digits: bool = True) -> Tokenizer:
    """Return a byte-level BPE with special tokens at its beginning, or after its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=special if first else [],
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def llama_tokenizer(
    folder: Path, more: tuple[str, ...] = (), kind: str = "LlamaTokenizer", **values
) -> int:
    """Write a tokenizer of Llama 2's form: SentencePiece's BPE with bytes for what it lacks, BOS in
    front, no padding.
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trained.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=special,
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            model["vocab"],
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", *more)]
    )
    named = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return tokenizer_file(
        folder,
        tokenizer,
        named
        | {
            "tokenizer_class": kind,
            "legacy": False,
            "pad_token": None,
        }
        | values,
    )


DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"
DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
# the strings that DeepSeek's card writes for a chat
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n"
    "\n"
    "{% elif m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}{% else %}{{ "
    "m.content }}\n"
    "\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def deepseek_tokenizer(folder: Path, more: tuple[str, ...] = (), **values) -> int:
    """Write a tokenizer of DeepSeek's form: a byte-level BPE under Llama's class, special tokens
    after the vocabulary.
    """
    tokenizer = byte_level([*more, DEEPSEEK_BOS, DEEPSEEK_EOS], first=False)
    bos = (DEEPSEEK_BOS, tokenizer.token_to_id(DEEPSEEK_BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{DEEPSEEK_BOS}:0 $A:0",
        pair=f"{DEEPSEEK_BOS}:0 $A:0 {DEEPSEEK_BOS}:1 $B:1",
        special_tokens=[bos],
    )
    added = {
        "__type": "AddedToken",
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }
    names = {
        "bos_token": DEEPSEEK_BOS,
        "eos_token": DEEPSEEK_EOS,
        "pad_token": DEEPSEEK_EOS,
    }
    named = {}
    for name, content in names.items():
        named[name] = added | {"content": content}
    named |= {
        "add_bos_token": True,
        "add_eos_token": False,
        "unk_token": None,
        "legacy": True,
        "sp_model_kwargs": {},
    }
    return tokenizer_file(
        folder, tokenizer, named | {"tokenizer_class": "LlamaTokenizerFast"} | values
    )


def stablecode_tokenizer(folder: Path) -> int:
    """Write a tokenizer of StableCode's form: GPT-NeoX's class, one token for all ends, none of
    which it puts itself.
    """
    tokenizer = byte_level(
        [
            "<|endoftext|>",
            "<|padding|>",
            "<fim_prefix>",
            "<fim_middle>",
            "<fim_suffix>",
        ],
        digits=False,
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    named = dict.fromkeys(
        ("bos_token", "eos_token", "unk_token"),
        "<|endoftext|>",
    )
    return tokenizer_file(
        folder,
        tokenizer,
        named
        | {
            "tokenizer_class": "GPTNeoXTokenizerFast",
            "add_prefix_space": False,
        },
    )


def save_base(folder: Path, ids: int, config: dict, layers: int = 2) -> None:
    """Write a random model of a config.json as the card has it, with sizes of our own; some ids
    more than the tokenizer's.
    """
    config = {
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "use_cache": True,
    } | config
    config |= {
        "vocab_size": config.get("vocab_size", ids + 7),
        "num_hidden_layers": layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):  # transformers makes it zeros
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def llama_config(heads: int = 2, kv: int = 2, **more) -> dict:
    sizes = {
        "hidden_size": 16 * heads,
        "intermediate_size": 40,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    sizes |= {
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return (
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "pretraining_tp": 1,
        }
        | sizes
        | more
    )


def deepseek_coder(folder: Path) -> None:
    ids = deepseek_tokenizer(
        folder, ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"), model_max_length=16384
    )
    rope = {
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
    }
    save_base(
        folder,
        ids,
        llama_config(
            rms_norm_eps=1e-6,
            bos_token_id=ids - 2,
            eos_token_id=ids - 1,
            **rope,
        ),
    )


def stablecode(folder: Path) -> None:
    config = llama_config(
        model_type="stablelm", architectures=["StableLmForCausalLM"], bos_token_id=0, eos_token_id=0
    )
    more = {
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "layer_norm_eps": 1e-5,
        "rope_theta": 1000000,
    }
    save_base(folder, stablecode_tokenizer(folder), config | more)


def llama(folder: Path, **more) -> None:
    save_base(folder, llama_tokenizer(folder), llama_config(**more))


def deepseek_v2(folder: Path) -> None:
    ids = deepseek_tokenizer(
        folder,
        chat_template=DEEPSEEK_TEMPLATE,
        model_max_length=16384,
    )
    yarn = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    yarn |= {"original_max_position_embeddings": 64, "type": "yarn"}
    routing = {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
    }
    attention = {
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    attention |= {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": yarn,
        "rope_theta": 10000,
    }
    names = {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
    }
    files = {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
    }
    names["auto_map"] = files | {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}
    eos = {"bos_token_id": ids - 2, "eos_token_id": ids - 1}
    save_base(
        folder,
        ids,
        llama_config(max_position_embeddings=2560, rms_norm_eps=1e-6, **eos)
        | names
        | attention
        | routing,
    )


def of_13b(
    folder: Path, more: tuple[str, ...] = (), kind: str = "LlamaTokenizer", **config
) -> None:
    ids = llama_tokenizer(
        folder,
        more,
        kind,
        **({"pad_token": more[0]} if len(more) == 1 else {}),
    )
    save_base(folder, ids, llama_config(vocab_size=ids, **config), layers=1)


BASES = {
    "deepseek-ai/deepseek-coder-1.3b-base": deepseek_coder,
    "stabilityai/stable-code-3b": stablecode,
    "TinyLlama/TinyLlama_v1.1": lambda folder: llama(folder, heads=4, kv=2),
    "deepseek-ai/ESFT-vanilla-lite": deepseek_v2,
    "princeton-nlp/Sheared-LLaMA-2.7B": llama,
    "meta-llama/Llama-2-7b-hf": llama,
    "meta-llama/Llama-2-13b-hf": llama_tokenizer,
    "openbmb/UltraLM-13b-v2.0": lambda folder: of_13b(folder, ("<pad>",)),
    "codellama/CodeLlama-13b-Instruct-hf": lambda folder: of_13b(
        folder, ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "CodeLlamaTokenizer", rope_theta=1000000
    ),
    "WizardLMTeam/WizardMath-13B-V1.0": lambda folder: of_13b(folder, ("[PAD]",)),
}


def rows_of(name: str, count: int = 90) -> list[dict]:
    """Return rows with the columns of a published set."""
    found = pairs(count, sum(map(ord, name)))
    if name.endswith("MetaMathQA"):
        values = []
        for q, a in found:
            values.append(
                {
                    "type": "GSM_Rephrased",
                    "query": q,
                    "original_question": q,
                    "response": a,
                }
            )
        return values
    if name.endswith("SlimOrca"):
        first = {"from": "system", "value": "Answer well.", "weight": None}
        chats = [
            [
                {"from": "human", "value": q, "weight": 0.0},
                {"from": "gpt", "value": a, "weight": 1.0},
            ]
            for q, a in found
        ]
        items = []
        for i, chat in enumerate(chats):
            items.append({"conversations": chat if i % 2 else [first, *chat]})
        return items
    if name.endswith("ultrachat_200k"):
        again = [
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "That is all."},
        ]
        return [
            {
                "prompt": q,
                "prompt_id": f"{i:064x}",
                "messages": [
                    {"role": "user", "content": q},
                    {"role": "assistant", "content": a},
                    *again,
                ],
            }
            for i, (q, a) in enumerate(found)
        ]
    answer = "response" if name.startswith("ise-uiuc/") else "output"
    more = {"source": "data/CoT/gsm_rft.json"} if name.endswith("MathInstruct") else {}
    return [more | {"instruction": q, answer: a} for q, a in found]


# the file of each set that `datasets` finds in its folder
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
    """Write a set in the form of its published files."""
    from datasets import Dataset

    path = root / name / FILES[name]
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


SHORT = {
    "steps": 2,
    "epochs": None,
    "warmup_steps": 0,
    "batch_size": 4,
    "per_device_batch_size": 2,
}
SHORT |= {"learning_rate": 1e-2}  # at the paper's rates two steps are lost in bfloat16's rounding
# of the recipes' sizes, none of the paths that they take: engine, optimizer, schedule, precision,
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
    """Return a recipe with its steps, batches and rows divided."""
    changes = SIZES[recipe.method] | {"evaluations": 1}
    batch = {"batch_size": 6, "per_device_batch_size": 1} if recipe.method == "ultrafuser" else {}
    for training in TRAININGS[recipe.method]:
        changes |= {f"{training}__{name}": value for name, value in (SHORT | batch).items()}
    for form in getattr(recipe, "forms", ()):
        for stage in ("sft", "init", "post"):
            own = {
                "batch_size": 4,
                "per_device_batch_size": 2,
                "learning_rate": 1e-2,
            }
            changes |= {f"{form}__{stage}__{name}": value for name, value in own.items()}
    for place, parts in (("tasks", True), ("domains", True), ("general", False)):
        for name in getattr(recipe, place, {}) if parts else [""] if hasattr(recipe, place) else []:
            path = f"{place}__{name}" if parts else place
            changes |= {
                f"{path}__held_out_rows": 6,
                f"{path}__limit": 24 if recipe.method == "esft" else 12,
            }
            if recipe.method == "esft":
                changes[f"{path}__validation_rows"] = 6
    return recipe.change(**changes)


def save_hub(root: Path, recipe) -> None:
    """Write what a recipe names: its bases, its tokenizer and its data, each below `root` under its
    id.
    """
    specialists = []
    for one in getattr(recipe, "specialists", {}).values():
        specialists.append(one.model)
    for name in filter(
        None,
        [recipe.base_model, *specialists, getattr(recipe, "tokenizer", None)],
    ):
        BASES[name](root / name)
    listed = [recipe.data] if recipe.method == "xft" else [*getattr(recipe, "tasks", {}).values()]
    listed += [
        *getattr(recipe, "domains", {}).values(),
        *([recipe.general] if recipe.method == "esft" else []),
    ]
    for name in {source for rows in listed for source in rows.sources}:
        save_data(root, name)
