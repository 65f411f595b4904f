"""What two compared models had besides their methods: optimizer steps, examples, learning-rate
schedules, and whether the best step was kept. A table marks methods whose budget is not that of its
reference, because a difference of their losses may be one of budgets.
"""

from pathlib import Path
from typing import NamedTuple

from moe_runtime.io.files import read_json


class Budget(NamedTuple):
    """The trainings from the base to a model."""

    steps: int
    examples: int
    schedule: str  # of all trainings, without repeats
    weights: str  # of the best or the last step

    def against(self, other: "Budget") -> str:
        """Return how this budget differs from the other one; empty if it does not."""
        parts = []
        for name, mine, theirs in zip(self._fields, self, other, strict=True):
            if mine != theirs:
                parts.append(f"{name} {mine} against {theirs}")
        return ", ".join(parts)


def budget_of(stage: Path) -> Budget | None:
    """Return the budget of a stage with all stages that it was made of, except the base; None if
    one is not recorded.
    """
    steps = examples = 0
    schedules = set()
    weights = "last step"
    average = None  # the stage is an average over the steps of its parent, or its last step
    folders = [stage]
    for folder in folders:  # which grows
        if folder.name.startswith("base-"):
            continue
        if not (folder / "result.json").is_file():
            return None
        result = read_json(folder / "result.json")
        made_of = result["made_of"]
        parents = {folder.with_name(parent) for parent in made_of["parents"]}
        folders += sorted(parents.difference(folders))
        training = made_of["settings"].get("training")
        average = made_of["settings"].get("of") or average
        if training and result["steps"]:
            steps += result["steps"]
            examples += result["steps"] * training["batch_size"]
            schedules.add(training["schedule"])
            if training.get("keep_best") and average is None:
                weights = "best step"
    if average not in (None, "last"):
        weights = average.upper()
    return Budget(steps, examples, " and ".join(sorted(schedules)), weights)
