"""Settings, selections, scores and recipes from JSON and YAML: read as they say, or refused by the file's name and the key."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from moe_runtime.config import MoEConfig
from moe_runtime.experiments import recipe
from moe_runtime.methods.esft import recipe as esft_recipe
from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import ExpertSelection
from moe_runtime.methods.ultrafuser import recipe as ultrafuser_recipe
from moe_runtime.methods.upit import recipe as upit_recipe
from moe_runtime.methods.xft import recipe as xft_recipe
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import mutate_bytes, mutate_value, to_json
from tests.support.stress import scaled

pytestmark = pytest.mark.stress
SELECTION = {
    "experts": {"0": [3, 1], "2": [0]},
    "shared_experts": False,
    "non_expert_modules": True,
    "score": "gate",
    "p": 0.2,
}
SCORES = {
    key: {str(layer): {str(e): (e + 1) / 6 for e in range(3)} for layer in (1, 2)}
    for key in ("token_scores", "gate_scores")
}
KINDS = {
    "xft": xft_recipe.Recipe, "esft": esft_recipe.EsftRecipe, "upit": upit_recipe.UpitRecipe,
    "ultrafuser": ultrafuser_recipe.FuserRecipe,
}  # fmt: skip


def says(built: Any, given: Any) -> bool:
    """Whether what was built holds all that was given; numbers may have been text, as in YAML's 5e-5, or integers."""
    if isinstance(given, dict):
        return isinstance(built, dict) and all(
            str(k) in map(str, built) and says(_of(built, k), v) for k, v in given.items()
        )
    if isinstance(given, list | tuple):
        return isinstance(built, list | tuple) and len(built) == len(given) and all(map(says, built, given))
    if isinstance(built, float) and not isinstance(given, bool):
        return built == float(given)
    return built == given and isinstance(built, bool) == isinstance(given, bool)


def _of(values: dict, key: Any) -> Any:
    return next(value for name, value in values.items() if str(name) == str(key))


def check(read: Callable[[], Any], given: Callable[[], Any], *names: str) -> bool:
    """Read; what is read must say what was given. Returns whether it was read."""
    verdict = attempt(read, *names)
    if verdict.is_read:
        assert says(verdict.value, given()), f"says something else: {str(verdict.value)[:150]} of {str(given())[:150]}"
    return verdict.is_read


def test_layer_settings():
    values = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2).to_dict()

    def case(rng: random.Random) -> None:
        changed = mutate_value(rng, values)
        check(lambda: MoEConfig.from_dict(copy.deepcopy(changed)).to_dict(), lambda: changed)

    run_seeds(scaled(500, 5000), case)


@pytest.mark.parametrize("kind", ["selection", "scores"])
def test_files_of_esft(tmp_path, kind):
    values, reader = {"selection": (SELECTION, ExpertSelection), "scores": (SCORES, ExpertScores)}[kind]
    path = tmp_path / f"{kind}.json"

    def case(rng: random.Random) -> None:
        path.write_bytes(to_json(rng, mutate_value(rng, values)))
        given = lambda: {k: v for k, v in json.loads(path.read_bytes()).items() if v is not None}  # noqa: E731
        if kind == "scores":  # a summary may hold more, as the official ones do
            given = lambda: {k: v for k, v in json.loads(path.read_bytes()).items() if k in SCORES}  # noqa: E731
        check(lambda: reader.load(path).to_dict(), given, path.name)

    run_seeds(scaled(400, 4000), case)


@pytest.mark.parametrize("method", KINDS)
def test_recipes(tmp_path, method):
    kind, path = KINDS[method], tmp_path / "recipe.yaml"
    sources = [
        yaml.safe_load(file.read_text()) for file in sorted((recipe.METHODS / method / "recipes").glob("*.yaml"))
    ]
    known = [kind.from_dict({"name": "recipe"} | source) for source in sources]
    assert all(
        map(says, [one.to_dict() for one in known], [{k: v for k, v in s.items() if k != "experts"} for s in sources])
    )

    def case(rng: random.Random) -> None:
        changed = mutate_value(rng, rng.choice(sources))
        data = yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")
        path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.2 else data)

        def given():
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            experts = values.get("experts")
            if isinstance(experts, dict):
                experts.pop("preset", None)
            return values

        check(lambda: recipe.load_recipe(kind, path).to_dict(), given, path.name)

    run_seeds(scaled(120, 1500), case)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi")
)
YAML = {
    "python tag": "!!python/object/apply:os.system ['true']",
    "python name": "base_model: !!python/name:os.system",
    "alias bomb": BOMB + "name: *i",
    "alias bomb as experts": BOMB + "experts: *i\nsft: *i",
    "merge bomb": MERGES,
    "own alias": "experts: &e {e: *e}\nsft: &s [*s]",
    "deep list": "[" * 1000,
    "deep blocks": "".join(f"{' ' * i}a:\n" for i in range(2000)),
    "bad date": "seed: 2026-13-45",
    "bad number": "seed: !!int x",
    "bad binary": "seed: !!binary \"\\x00\"",
    "long number": "seed: " + "9" * 10_000,
    "key twice": "base_model: a\nbase_model: b",
    "key twice below": "data: {limit: 1, limit: 2}",
    "unhashable key": "? [a]\n: b",
    "number as key": "1: 2",
    "two documents": "a: 1\n---\nb: 2",
    "empty": "",
    "NUL": "a: \0",
    "BOM": "\ufeffa: 1",
    "text": "words",
    "unknown alias": "a: *b",
    "tabs": "a:\n\t- b",
}  # fmt: skip


@pytest.mark.parametrize("case", YAML)
def test_what_yaml_can_do_to_a_recipe(tmp_path, case):
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML[case], encoding="utf-8")
    for kind in KINDS.values():
        assert not attempt(lambda: recipe.load_recipe(kind, path), path.name).is_read  # noqa: B023
    attempt(lambda: recipe.method_of(path), path.name)
