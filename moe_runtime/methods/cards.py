"""What the methods add to model cards: their papers, and the folders that only they write.

Imported with `moe_runtime.methods`, before any method; `push_to_hub` is `moe_runtime.push_to_hub`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_runtime.hf.common.sources import is_id
from moe_runtime.hf.models import hub
from moe_runtime.hf.models.hub import push as push_to_hub
from moe_runtime.io.files import read_json

__all__ = ["check_references", "push_to_hub"]

FUSED = "fuser_config.json"
_ADAPTER = """from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM

from moe_runtime import esft

model = AutoModelForCausalLM.from_pretrained("{base}")
esft.apply(model, snapshot_download("{repo}"))
"""
_FUSED = """from huggingface_hub import snapshot_download

from moe_runtime import ultrafuser

model = ultrafuser.UltraFuser.from_pretrained(snapshot_download("{repo}"))
"""


def check_references(specialists: Sequence[str]) -> None:
    """Raise ValueError if a fused model to upload refers to specialists that are not Hub ids."""
    local = [path for path in specialists if not is_id(path)]
    if local:
        raise ValueError(
            f"A fused model that refers to the local folder {local[0]} cannot be loaded elsewhere. "
            "Write it with --copy, or fuse Hub ids"
        )


def _check_fused(folder: Path) -> None:
    """Raise ValueError if a fused model's folder refers to specialists outside of it."""
    outside = []
    for described in read_json(folder / FUSED).get("specialists") or ():
        if isinstance(described, Mapping):
            path = str(described.get("path"))
            if Path(path).is_absolute() or not Path(folder, path).is_dir():
                outside.append(path)
    check_references(outside)


hub.PAPERS |= {
    "xft": hub.Paper(
        "XFT",
        "XFT: Unlocking the Power of Code Instruction Tuning by Simply Merging Upcycled "
        "Mixture-of-Experts",
        "2404.15247",
    ),
    "upit": hub.Paper(
        "upit",
        "Upcycling Instruction Tuning from Dense to Mixture-of-Experts via Parameter Merging",
        "2410.01610",
    ),
    "esft": hub.Paper(
        "ESFT",
        "Let the Expert Stick to His Last: Expert-Specialized Fine-Tuning for Sparse "
        "Architectural Large Language Models",
        "2407.01906",
    ),
    "ultrafuser": hub.Paper(
        "ultrafuser",
        "Mastering Text, Code and Math Simultaneously via Fusing Highly Specialized Language "
        "Models",
        "2403.08281",
    ),
}
hub.KINDS |= {
    "expert_cfg.json": hub.Kind(
        "Tuned experts of a Mixture-of-Experts model", _ADAPTER, is_adapter=True, method="esft"
    ),
    FUSED: hub.Kind(
        "A fused model of specialists", _FUSED, method="ultrafuser", check=_check_fused
    ),
}
