"""UltraFuser: specialists of one family fused by a token-level gate, in the order of the paper.

UltraFuser (arXiv 2403.08281), Sec. 3:

  1. UltraFuser(specialists, templates)     models with one tokenizer, each with the template it was tuned on
  2. fuser.freeze_specialists(), train      stage 1: the gate alone
  3. fuser.train_all(), train               stage 2: all, with batches balanced over the domains
  4. fuser.generate(**fuser.encode([...]))  one token at a time from the mixed logits
  5. save, load                             a folder that names the specialists or holds them
"""

from moe_runtime.methods.ultrafuser.folders import FusedHead, load, load_head, restore, save
from moe_runtime.methods.ultrafuser.heads import Head
from moe_runtime.methods.ultrafuser.inputs import TEMPLATES, Encoder
from moe_runtime.methods.ultrafuser.model import UltraFuser, UltraFuserConfig, UltraFuserOutput
from moe_runtime.modules.fuser import FuserGate, FuserLoss, fuser_loss
from moe_runtime.ops.fusion import fuse_logits, fused_cross_entropy

__all__ = [
    "TEMPLATES",
    "Encoder",
    "FusedHead",
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
    "load_head",
    "restore",
    "save",
]
