"""papers.ultrafuser.sums_study: what is compared is what it says, and a solved sum is
one that is generated.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.methods import ultrafuser
from papers.engine.domains import Judged, of_domain
from papers.ultrafuser import tables
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.sums_study import FULL, GATE, best_of, by_steps
from tests.support import fuser_study


class Made:
    """The table on a study of sums and words."""

    def __init__(self, folder):
        template = {"template": "{prompt}"}
        path = fuser_study.write_study(
            folder,
            max_length=240,
            domains={
                "sums": {"train": "steps", "limit": 16, "held_out_rows": 9},
                "words": {"train": str(folder / "words.jsonl"), "held_out_rows": 6},
            },
            specialists={"sums": template | {"steps": 6}, "words": template},
        )
        self.recipe = load_recipe(path)
        self.out = folder / "out"
        self.report = tables.run("sums", self.recipe, self.out, seeds=1, say=print)
        self.stages = tables.Stages(self.recipe, self.out, say=print)

    def result(self, name):
        return self.report.entry(name).results[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("sums"))


def test_every_model_has_its_row(made):
    names = [entry.name for entry in made.report.entries]
    # 6 and 4 steps of the specialists, 4 and 4 of the stages
    single = ["one model, 6 steps, balanced", "one model, 18 steps"]
    assert names == [
        "base",
        "specialist sums",
        "specialist words",
        "average of the weights",
        "average of the logits",
        "sample-level selector",
        "best specialist per example",
        *single,
        GATE,
        FULL,
    ]
    assert [
        made.result(name).steps for name in ("specialist sums", "specialist words", *single)
    ] == [6, 4, 6, 18]
    assert made.report.domains == ("1 step", "2 steps", "3 steps", "words")
    assert len(made.report.summary) == len(names) + 1 and all(
        len(row) == len(made.report.columns()) for row in made.report.rows()
    )
    values = json.loads((made.out / "sums.json").read_text())
    assert (
        values["mcnemar"].keys() == set(names) - {FULL}
        and (made.out / "sums.png").read_bytes()[:4] == b"\x89PNG"
    )


def test_plain_fusions_are_means(made):
    folders = [made.stages.specialist(name).source for name in ("sums", "words")]
    first, second, mean = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (*folders, made.stages.averaged().folder)
    )
    assert all(
        torch.allclose(mean[name], (first[name] + second[name]) / 2, atol=1e-7) for name in mean
    )
    equal = ultrafuser.load(made.stages.equal().folder)
    models = [AutoModelForCausalLM.from_pretrained(f) for f in folders]
    prompt = "Ada has 2 pens.\n"
    ids = torch.tensor([equal.encoder.prompt(prompt)[0]])
    with torch.no_grad():
        want = sum(model(ids).logits[0, -1] for model in models) / 2
        got = equal(**equal.encode([prompt], ["x"]), want_logits=True).logits[0, 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_greedy_generation_solves_what_the_table_says(made):
    """Trained models solve none of these sums: so of one that does, and of one that does not."""
    stages = made.stages
    fused = made.stages.fused()
    model = ultrafuser.load(fused.folder)
    rows = stages.part("held_out").select(range(9))
    with torch.no_grad():
        batch = stages.encoder.collate([rows[place] for place in range(9)])
        own = model.generate(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"],
            max_new_tokens=5,
            do_sample=False,
        )
    answers = [
        ids if place % 2 else [(ids[0] + 1) % 250, *ids[1:]]
        for place, ids in enumerate(own.tolist())
    ]
    stages._rows["held_out"] = type(rows).from_dict(rows.to_dict() | {"response_ids": answers})
    try:
        flags = stages.generated(fused, "sums")
        found = tables.sums_study.fuser_losses(
            model, stages.part("held_out"), collator=stages.encoder.collate
        )
    finally:
        del stages._rows["held_out"]
    assert flags == found[2] == [place % 2 for place in range(9)]


def judged(losses, exact, **more):
    tokens = [2] * len(losses)
    return Judged(
        "",
        None,
        0.0,
        losses,
        tokens,
        {"sums": 3, "words": 1},
        0,
        0.0,
        1.0,
        5,
        5,
        [],
        0.0,
        exact=exact,
        **more,
    )


def test_the_best_specialist_of_each_example_has_its_loss_and_its_answer():
    best = best_of(
        [judged([1.0, 5.0, 2.0, 4.0], [1, 0, 0, 0]), judged([2.0, 3.0, 3.0, 1.0], [0, 1, 1, 0])]
    )
    assert best.losses == [1.0, 3.0, 2.0, 1.0] and best.exact == [1, 1, 0, 0] and best.loss == 7 / 4
    assert best.parameters == 10 and best.total_seconds == 2.0


def test_sums_are_divided_by_their_steps():
    divided = by_steps(judged([1.0, 2.0, 3.0, 9.0], [0, 1, 1, 0]), "sums", [2, 1, 2])
    assert divided.rows == {"1 step": 1, "2 steps": 2, "words": 1} and divided.losses == [
        2.0,
        1.0,
        3.0,
        9.0,
    ]
    assert divided.exact == [1, 0, 1, 0] and of_domain(divided, "2 steps").exact == [0, 1]


def test_a_recipe_without_sums_or_steps_is_refused(made, tmp_path):
    recipe = load_recipe(fuser_study.write_study(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"domain of arithmetic, sums, steps, but it has .*sums.jsonl, .* steps \[4, 4\]",
    ):
        tables.run("sums", recipe, tmp_path / "out", say=print)
    epochs = made.recipe.specialist.change(steps=None, epochs=1)
    with pytest.raises(ValueError, match=r"domains steps, .* and the steps \[6, None\]"):
        tables.run("sums", made.recipe.change(specialist=epochs), tmp_path / "out", say=print)
