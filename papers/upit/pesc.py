"""PESC, a baseline of UpIT (arXiv 2410.01610, App. A.1): experts that are adapters behind a dense
MLP.

    h = mlp(x),  y = h + sum_k w_k U_k act(D_k h)          w from a router over h, gated as UpIT's experts are

The base is frozen; U starts at 0, so the model initially equals the base. The paper gives no width;
an adapter here has as many weights as a LoRA expert.
"""

from pathlib import Path

import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models.families import family_of, moe_shape
from moe_runtime.hf.common.outputs import share_of_batch
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.io.checkpoint import Checkpoint, write_tensors
from moe_runtime.modules.moe import MoE
from papers.engine.domains import Judged
from papers.upit import study

NAME = "PESC"
FILE = "adapters.safetensors"


class AdapterMoE(nn.Module):
    """A dense MLP followed by adapters."""

    def __init__(self, mlp: nn.Module, config: MoEConfig, device):
        super().__init__()
        self.mlp, self.moe = mlp, MoE(config, dtype=torch.float32, device=device)
        nn.init.zeros_(self.moe.experts.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., H] -> [..., H]."""
        h = self.mlp(x)
        return h + self.moe(h.to(self.moe.gate.weight.dtype)).to(h.dtype)


def add_adapters(model: nn.Module, rank: int, seed: int = 0, **experts) -> nn.Module:
    """Add adapters, the only trainable weights, after a dense model's MLPs in place; `experts` are
    MoEConfig's settings.
    """
    family = family_of(model)
    shape = moe_shape(family, model.config)
    H = shape["hidden_size"]
    I = shape["intermediate_size"]
    width = max(round(3 * rank * (H + I) / (2 * H)), 1)  # three pairs of rank r, of H + I each
    config = MoEConfig(
        hidden_size=H, intermediate_size=width, gated=False, hidden_act="gelu", **experts
    )
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for layer in range(model.config.num_hidden_layers):
        path = family.path.format(layer)
        mlp = model.get_submodule(path)
        model.set_submodule(
            path, AdapterMoE(mlp, config, next(mlp.parameters()).device).train(mlp.training)
        )
    return model


class AdapterTrainer(MoETrainer):
    """A MoETrainer that adds the balance losses of a model whose own class has none."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the model's loss plus its layers' balance losses, weighted like the loss."""
        layers = [module.moe for module in self.model.modules() if isinstance(module, AdapterMoE)]
        for moe in layers:
            moe.records = []
        try:
            loss, out = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            losses = [
                record.balance_loss
                for moe in layers
                for record in moe.records
                if record.balance_loss is not None
            ]
        finally:
            for moe in layers:
                moe.records = None
        if losses and self.model.training:
            share = share_of_batch(
                {**inputs, "num_items_in_batch": num_items_in_batch}, loss.device
            )
            loss = loss + self._ranks(num_items_in_batch) * share * torch.stack(losses).sum()
        return (loss, out) if return_outputs else loss


class Stages(study.Stages):
    """The stages of a study, with PESC's."""

    def pesc(self) -> Judged:
        """Return the base with adapters as experts, tuned for the epochs of both of UpIT's
        stages.
        """
        base = self.base()
        training = self._form("lora").copied
        experts = self.recipe.experts.to_dict()
        if experts["top_k"] == experts["num_experts"] and experts["balance_loss"] == "switch":
            experts["balance_loss"] = "none"  # constant if every expert sees every token

        def build() -> nn.Module:
            return add_adapters(
                self._load(base.folder, device=False),
                self.recipe.lora.rank,
                seed=42 + self.seed,
                **experts,
            )

        def load(folder: Path) -> nn.Module:
            model = build()
            with Checkpoint(folder, FILE) as saved, torch.no_grad():
                for name, tensor in model.state_dict().items():
                    if ".moe." in name:
                        tensor.copy_(saved.get(name))
            return model.to(ranks.state().device)

        def make(tmp: Path, checkpoints: Path) -> dict:
            model = build()
            rows = (self.train_rows, self.held_out)
            trained = self._train(NAME, model, *rows, training, checkpoints, trainer=AdapterTrainer)
            weights = trained.state_dict() or {}
            with ranks.leading() as main:
                if main:
                    (tmp / "model").mkdir()
                    write_tensors(
                        tmp / "model" / FILE,
                        {name: weights[name] for name in weights if ".moe." in name},
                    )
            return self._numbers(model, trained, lambda: load(tmp / "model"))

        settings = self._settings(training) | self._rank("lora") | {"experts": experts}
        return self._stage("pesc", NAME, settings, [base], make)
