"""UltraFuser: specialists of one family fused by a token-level gate, in the order of the paper.

UltraFuser (arXiv 2403.08281), Sec. 3:

    UltraFuser(specialists, templates)     models with one tokenizer, each with its template
    fuser.freeze_specialists(), train      stage 1: the gate alone                  Algorithm 1
    fuser.train_all(), train               stage 2: all, with balanced batches      Algorithm 1
    fuser.generate(**fuser.encode([...]))  one token at a time from mixed logits    App. B
    save, load                             a folder that refers to the specialists or has copies

The steps: `specialists` -> `inputs` -> `heads` -> `model` -> `training` and `generation`. From disk
to disk, as the command line does it: `folders`, and `runs` for both stages.
"""

from moe_runtime.methods.ultrafuser.folders import load, save
from moe_runtime.methods.ultrafuser.heads import Head
from moe_runtime.methods.ultrafuser.inputs import TEMPLATES, Encoder
from moe_runtime.methods.ultrafuser.model import UltraFuser, UltraFuserConfig, UltraFuserOutput
from moe_runtime.modules.fuser import FuserGate, FuserLoss, fuser_loss
from moe_runtime.ops.fusion import fuse_logits, fused_cross_entropy

__all__ = [
    "TEMPLATES",
    "Encoder",
    "FuserGate",
    "FuserLoss",
    "Head",
    "UltraFuser",
    "UltraFuserConfig",
    "UltraFuserOutput",
    "fuse_logits",
    "fused_cross_entropy",
    "fuser_loss",
    "load",
    "save",
]
