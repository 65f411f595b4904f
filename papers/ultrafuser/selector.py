"""Select one specialist per prompt instead of mixing per token: the design UltraFuser (arXiv
2403.08281, Sec. 3.1) rejects.

    w = softmax_s(g(h_s)),  L = mean over rows of sum_s w_s l_s,  the answer is that of argmax_s w_s

h_s is specialist s's last state of the prompt, l_s its loss per token of the response, g the gate
of the fused model. The specialists are frozen and run once over the rows; the selector learns from
their outputs, for as many steps as stage 1.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_runtime.hf.training import fit as trainers
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io.checkpoint import write_tensors
from moe_runtime.methods.ultrafuser.heads import inner_model
from moe_runtime.modules.fuser import FuserGate
from papers.engine.domains import Judged
from papers.ultrafuser import study

PARTS = ("train", "held_out")


def prompt_states(model, batch: dict) -> list[torch.Tensor]:
    """Return a causal LM's last state [H] before each row's response."""
    hidden = inner_model(model)(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    before = (batch["labels"] != -100).int().argmax(1) - 1
    return list(hidden[torch.arange(len(hidden), device=hidden.device), before].float().cpu())


def train_selector(
    gate: FuserGate,
    states: Sequence[torch.Tensor],
    losses: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
) -> FuserGate:
    """Train a gate in place by AdamW on `states`, S of [N, H_s], and the specialists' losses [N,
    S]; `seed` draws the rows.
    """
    optimizer = torch.optim.AdamW(gate.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.randint(len(losses), (batch_size,), generator=generator)
        loss = (gate([state[drawn] for state in states]) * losses[drawn]).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return gate.eval()


class Stages(study.Stages):
    """The stages of a study, with the selector's."""

    def selected(self) -> Judged:
        """Return the specialists behind a selector, which selects one of them for each held-out
        row.
        """
        specialists = [self.specialist(name) for name in self.names]

        def make(tmp: Path, folder: Path) -> dict:
            start = time.perf_counter()
            found = [self._seen(one.source, number) for number, one in enumerate(specialists)]
            states = {part: [torch.stack(one[part][0]) for one in found] for part in PARTS}
            losses = {part: torch.tensor([one[part][1] for one in found]).T for part in PARTS}
            torch.manual_seed(self.seed)
            gate = FuserGate(
                [state.shape[1] for state in states["train"]],
                kind=self.recipe.gate,
                joint=self.recipe.joint,
            )
            training = {
                of: getattr(self.recipe.stage1, of)
                for of in ("steps", "batch_size", "learning_rate")
            }
            train_selector(gate, states["train"], losses["train"], seed=self.seed, **training)
            with torch.no_grad():
                chosen = gate(states["held_out"]).argmax(-1)
            with ranks.leading() as main:
                if main:
                    (tmp / "model").mkdir()
                    write_tensors(tmp / "model" / "selector.safetensors", gate.state_dict())
            own = losses["held_out"].gather(1, chosen[:, None])[:, 0].tolist()
            exact = [found[s]["held_out"][3][row] for row, s in enumerate(chosen.tolist())]
            trained = sum(p.numel() for p in gate.parameters())
            one = max(r.active_parameters for r in specialists)
            sizes = {
                "parameters": sum(r.parameters for r in specialists) + trained,
                "active_parameters": one + trained,
            }
            course = {
                "steps": training["steps"],
                "seconds": time.perf_counter() - start,
                "trained_parameters": trained,
            }
            return course | sizes | self._loss(own, found[0]["held_out"][2], exact)

        settings = self._settings(self.recipe.stage1) | {
            "gate": self.recipe.gate,
            "joint": self.recipe.joint,
            "drawn": True,
        }
        return self._made("selected", "sample-level selector", settings, specialists, make)

    def _seen(self, source: str, number: int) -> dict[str, tuple]:
        """Return, for the rows of each part, a specialist's states before the responses, and its
        `row_losses`.

        Only as many training rows are included as the selector's steps use.
        """
        model = ranks.load_model(source, self.recipe.dtype, ranks.state().device)
        found = {}
        for part in PARTS:
            rows = self._single(part, number)
            if part == "train":
                drawn = torch.randperm(
                    len(rows), generator=torch.Generator().manual_seed(self.seed)
                )
                rows = rows.select(
                    drawn[: self.recipe.stage1.steps * self.recipe.stage1.batch_size].tolist()
                )
            states = trainers.each_row(
                model, rows, prompt_states, collator=pair_collator(self.tokenizer), **self._judging
            )
            found[part] = (
                states,
                *trainers.row_losses(model, rows, self.tokenizer, **self._judging),
            )
        return found
