"""methods/lora/serving.py: what an engine reads by its names is PEFT's own change; what it would
drop is refused.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_runtime.io.files import read_json
from moe_runtime.methods.lora.baseline import load_lora
from moe_runtime.methods.lora.serving import ENGINES, export_adapter
from tests.support.peft_adapter import BOTH, adapted, deltas
from tests.support.stock_moe import batch, stock

STACKS = ("gate_up_proj", "down_proj")
# transformers' names of the two stacks' parts, by the checkpoint's
PARTS = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1, "down_proj": None, "w2": None}


def read_back(
    folder, engine: str, paths: dict[str, str], num_experts=8, slowest=False
) -> dict[str, torch.Tensor]:
    """Return the change of each parameter as an engine computes it from a file: written from the
    names in ENGINES alone.

    `paths` gives the model's path of an experts module by the file's. `slowest` is a mutant: B of a
    stack is read with the expert slowest.
    """
    tensors = load_file(folder / "adapter_model.safetensors")
    config = read_json(folder / "adapter_config.json")
    keys = ENGINES[engine]
    scaling = config["lora_alpha"] / config["r"]
    found = {}

    def pattern(template):
        names = {
            "experts": r"(?P<experts>.+\.experts)",
            "e": r"(?P<e>\d+)",
            "projection": r"(?P<projection>\w+)",
            "half": "A",
        }
        return re.escape(template).replace(r"\{", "{").replace(r"\}", "}").format(**names)

    for key in [key for key in tensors if "lora_A" in key]:
        a = tensors.pop(key)
        b = tensors.pop(key.replace("lora_A", "lora_B"))
        if match := re.fullmatch(pattern(keys.expert), key):
            assert a.shape[0] == b.shape[1] == config["r"]
            part = PARTS[match["projection"]]
            name = paths[match["experts"]]
            stack = found.setdefault(
                f"{name}.{'down_proj' if part is None else 'gate_up_proj'}", {}
            )
            stack[int(match["e"]), part] = scaling * b @ a
            continue
        for stack, template in keys.stacks.items():
            if match := re.fullmatch(pattern(template), key):
                E = num_experts
                r = config["r"]
                b = b.view(-1, E, r).transpose(1, 2) if slowest else b.view(-1, r, E)
                change = torch.einsum("ore,eri->eoi", b, a.view(E, r, -1)) * scaling
                found[f"{paths[match['experts']]}.{stack}"] = change
                break
        else:
            found[re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", key)[1] + ".weight"] = (
                scaling * b @ a
            )
    assert not tensors
    for name, change in found.items():
        if isinstance(change, dict):
            if None not in {part for _, part in change}:
                halves = sorted({part for _, part in change})
            else:
                halves = [None]
            found[name] = torch.stack(
                [torch.cat([change[e, part] for part in halves]) for e in range(num_experts)]
            )
    return found


@pytest.mark.parametrize(
    "engine, family, settings",
    [
        pytest.param("vllm", "qwen3_moe", {}, id="vllm, r is neither 1 nor E"),
        pytest.param("vllm", "mixtral", {"r": 8}, id="vllm, the folder's own names"),
        pytest.param("vllm", "gpt_oss", {}, id="vllm, stacks"),
        pytest.param(
            "vllm",
            "deepseek_v2",
            {"modules": ("kv_a_proj_with_mqa",)},
            id="vllm, a dense layer first",
        ),
        pytest.param("sglang", "qwen3_moe", {"modules": ("q_proj", "v_proj")}, id="sglang"),
        pytest.param(
            "sglang", "qwen3_5_moe_text", {"modules": ("o_proj",)}, id="sglang, of stacks"
        ),
        pytest.param(
            "vllm", "qwen3_5_moe_text", {"modules": ("o_proj",)}, id="vllm, stacks with gate first"
        ),
        pytest.param(
            "vllm",
            "qwen3_moe",
            {"rank_pattern": {BOTH[0]: 6}, "alpha_pattern": {"q_proj": 9}, "use_rslora": True},
            id="ranks and scalings that differ",
        ),
        pytest.param("vllm", "qwen3_moe", {"parameters": BOTH[:1]}, id="vllm, zeros for down"),
        pytest.param(
            "vllm",
            "gpt_oss",
            {"parameters": BOTH[:1]},
            id="vllm, gate_up alone is not taken for down",
        ),
    ],
)
def test_read_back_by_the_names_it_is_pefts_change(tmp_path, engine, family, settings):
    made = adapted(tmp_path, family, **settings)
    want = {
        name: d.transpose(1, 2) if family == "gpt_oss" and d.dim() == 3 else d
        for name, d in deltas(made).items()
    }
    receipt = export_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", engine)
    mine = {name.rpartition(".")[0] for name, d in want.items() if d.dim() == 3}
    theirs = {
        path.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else path: path
        for path in mine
    }
    found = read_back(tmp_path / "out", engine, theirs | {path: path for path in mine})
    assert receipt.layers == len(mine) and receipt.version == ENGINES[engine].version
    for name in set(receipt.filled):
        assert not found.pop(name).any()
    assert (
        len(receipt.filled) == (2 if settings.get("parameters") == BOTH[:1] else 0)
        and found.keys() == want.keys()
    )
    for name, change in want.items():
        torch.testing.assert_close(found[name], change, rtol=1e-5, atol=1e-6)


def test_a_reader_with_the_expert_slowest_is_found_out(tmp_path):
    want = deltas(adapted(tmp_path, "gpt_oss"))
    export_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", "vllm")
    paths = {
        name.rpartition(".")[0]: name.rpartition(".")[0]
        for name in want
        if name.endswith("down_proj")
    }
    found = read_back(tmp_path / "out", "vllm", paths, slowest=True)
    for path in paths:
        change = want[f"{path}.down_proj"].transpose(1, 2)
        assert (found[f"{path}.down_proj"] - change).norm() > change.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_peft_reads_what_is_written_for_vllm(tmp_path, family):
    made = adapted(tmp_path, family)
    export_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", "vllm")
    again = load_lora(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again(**batch()).logits, made(**batch()).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "engine, family, settings, match",
    [
        (
            "vllm",
            "granitemoe",
            {"parameters": STACKS},
            "has no known name for the pairs of 'granitemoe'",
        ),
        (
            "vllm",
            "qwen3_moe",
            {"parameters": (*BOTH, "mlp.gate.weight")},
            "mlp.gate.weight, which is neither a linear layer",
        ),
        (
            "sglang",
            "gpt_oss",
            {"modules": ("q_proj", "v_proj")},
            "has no known name for the pairs of 'gpt_oss'",
        ),
        (
            "vllm",
            "gpt_oss",
            {"parameters": (*BOTH, "down_proj_bias")},
            "down_proj_bias, which is neither",
        ),
        ("sglang", "qwen3_moe", {}, "self_attn.q_proj but not v_proj, which sglang reads together"),
        ("vllm", "qwen3_moe", {"modules_to_save": ["lm_head"]}, "holds all of lm_head.weight"),
        ("ollama", "qwen3_moe", {}, "engine must be"),
    ],
)
def test_what_an_engine_would_drop_is_refused(tmp_path, engine, family, settings, match):
    adapted(tmp_path, family, model=stock(family, tie_word_embeddings=False), **settings)
    with pytest.raises(ValueError, match=match) as error:
        export_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", engine)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_the_page_has_the_names():
    page = (Path(__file__).resolve().parents[3] / "docs" / "adapters-serving.md").read_text()
    for engine, keys in ENGINES.items():
        templates = {
            template.removeprefix("base_model.model.")
            for template in (keys.expert, *keys.stacks.values())
        }
        lines = [
            line for line in page.splitlines() if line.startswith(f"| {engine} {keys.version} |")
        ]
        assert (
            templates
            == {name for line in lines for name in re.findall(r"`([^`]*lora_[^`]*)`", line)}
            and keys.read in page
        )
        assert all(family in "".join(lines) for family in keys.stacked_families)


@pytest.mark.parametrize(
    "files, says",
    [
        (None, "is no folder. Pass the folder of an adapter"),
        ((), "has no adapter_config.json. Pass"),
        (
            ("expert_cfg.json",),
            "has no adapter_config.json. It is an ESFT adapter of whole experts",
        ),
    ],
)
def test_a_folder_without_an_adapter_is_named(files, says, tmp_path):
    if files is not None:
        (tmp_path / "adapter").mkdir()
        for name in files:
            (tmp_path / "adapter" / name).write_text("{}")
    with pytest.raises(ValueError, match=f"Adapter '.*/adapter' {says}"):
        export_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()
