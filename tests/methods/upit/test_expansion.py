"""moe_runtime.methods.upit.expansion: children against the equations in memory, what is read, what
is kept, bounded memory.
"""

import itertools
import json
import math
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.io.files import read_json
from moe_runtime.methods.upit import expansion as upit_expansion
from moe_runtime.methods.upit import pool as upit_pool
from moe_runtime.methods.upit.checkpoints import save_expert
from moe_runtime.methods.upit.expansion import expand_experts
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.ops.expansion import stream_of
from moe_runtime.tools.conformance import oracle
from tests.hf.tiny import dense, logits
from tests.methods.upit.test_experts import perturbed
from tests.support import limited
from tests.support.checkpoints import assert_equal, tensors
from tests.support.oracle import relative_error


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base, and three experts of it as whole models and as adapters."""
    folder = tmp_path_factory.mktemp("experts")
    base = folder / "base"
    dense("llama").save_pretrained(base)
    for i in range(3):
        model = perturbed(base, i, "")
        save_expert(model, folder / f"ffn-{i}")
        torch.manual_seed(i)
        adapted = peft.get_peft_model(model, lora_of(rank=3))
        save_expert(
            adapted,
            folder / f"lora-{i}",
            record={"base": str(base)},
        )
    return folder


def lora_of(rank: int):
    targets = ["q_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)


def given(place: Path, kind: str, count: int = 3) -> list[Path]:
    return [place / f"{kind}-{i}" for i in range(count)]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of an expert of any kind."""
    expert = open_expert(folder)
    return {key: expert.get(key) for key in expert.keys()}


def child_of(parents, base, made, options: dict, seed: int, key: str) -> torch.Tensor:
    """Apply DARE to one matrix in float64, with the masks of its seed."""
    drop = options.get("drop", 0.5)
    scale = 1 / (1 - drop)
    keeps = oracle.kept_by_dare(
        seed,
        stream_of(key),
        base.numel(),
        drop,
    )
    out = base
    for parent, weight, keep in zip(parents, made.weights, keeps, strict=True):
        out = out + weight * scale * keep.view(base.shape) * (parent - base)
    return out


def distance_of(first, second, base, options: dict) -> float:
    """Return the distance between the changes of the MLPs."""

    def flat(expert):
        parts = []
        for key in expert:
            if ".mlp." in key:
                parts.append((expert[key] - base[key]).flatten())
        return torch.cat(parts)

    a = flat(first)
    b = flat(second)
    if options.get("metric") == "l2":
        return (a - b).norm().item()
    return 1 - (a @ b / a.norm() / b.norm()).item()


def reference(experts, base, found, options: dict):
    """Run Algorithm 2's loop in float64 with the weights in the results; return the children's
    parents, distances and tensors, and the pool.
    """
    pool = [{key: t.double() for key, t in expert.items()} for expert in experts]
    base = {key: t.double() for key, t in base.items()}
    children = []
    for made in found.children:
        pairs = {}
        for j, k in itertools.combinations(range(len(pool)), 2):
            pairs[j, k] = distance_of(
                pool[j],
                pool[k],
                base,
                options,
            )
        j, k = max(sorted(pairs), key=pairs.get)
        seed = upit_expansion._seed(
            options.get("seed", 0),
            len(pool),
        )
        new = {}
        for key in pool[0]:
            parents = (pool[j][key], pool[k][key])
            new[key] = sum(parents) / 2
            if ".mlp." in key:
                new[key] = child_of(
                    parents,
                    base[key],
                    made,
                    options,
                    seed,
                    key,
                )
        children.append(((j, k), pairs[j, k], new))
        pool.append({key: t.to(experts[0][key].dtype).double() for key, t in new.items()})
    return children, pool


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("ffn", {}, id="ffn"),
        pytest.param("ffn", {"metric": "l2", "drop": 0.25, "seed": 7}, id="ffn-l2"),
        pytest.param("lora", {}, id="lora"),
        pytest.param("lora", {"metric": "l2", "drop": 0.9}, id="lora-l2"),
    ],
)
def test_children_are_those_of_the_equations(place, tmp_path, monkeypatch, kind, options):
    monkeypatch.setattr(upit_pool, "CHUNK", 1000)
    out = tmp_path / "out"
    found = expand_experts(
        given(place, kind),
        6,
        out,
        base=place / "base",
        **options,
    )
    experts = [read(folder) for folder in given(place, kind)]
    base = tensors(place / "base")
    if kind == "lora":
        base = {key: torch.zeros_like(tensor) for key, tensor in experts[0].items()}
    children, pool = reference(experts, base, found, options)
    assert found.experts == [*given(place, kind), *(out / f"expert-{i}" for i in (3, 4, 5))]
    for made, (parents, distance, new) in zip(found.children, children, strict=True):
        assert made.parents == parents
        assert made.distance == pytest.approx(distance, rel=1e-5)
        assert sum(made.weights) == pytest.approx(1)
        assert 0 < made.weights[0] < 1
        written = read(made.folder)
        assert written.keys() == new.keys()
        for key, tensor in new.items():
            assert relative_error(written[key], tensor) < 1e-6
    assert len({made.weights for made in found.children}) == 3  # new ones for each
    for i, j in itertools.combinations(range(6), 2):
        distance = distance_of(
            pool[i],
            pool[j],
            base,
            options,
        )
        assert found.distance[i, j] == pytest.approx(distance, rel=1e-5, abs=1e-7)
    assert torch.equal(found.distance, found.distance.T)
    assert not found.distance.diagonal().any()
    summary = read_json(out / "expansion.json")
    assert summary["experts"] == [str(path) for path in found.experts]
    assert summary["distance"] == found.distance.tolist()
    assert [one["folder"] for one in summary["children"]] == ["expert-3", "expert-4", "expert-5"]


def test_a_child_depends_on_no_layout(place, tmp_path, monkeypatch):
    options = {"base": place / "base", "seed": 3}
    first = expand_experts(
        given(place, "ffn"),
        5,
        tmp_path / "a",
        **options,
    )
    monkeypatch.setattr(upit_pool, "CHUNK", 700)
    again = [tmp_path / f"again-{i}" for i in range(3)]
    for folder, copy in zip(given(place, "ffn"), again, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(copy, max_shard_size="9KB")
    second = expand_experts(
        again,
        5,
        tmp_path / "b",
        max_shard_size="15KB",
        **options,
    )
    assert len(list((tmp_path / "b" / "expert-3").glob("*.safetensors"))) > 3
    for i in (3, 4):
        assert_equal(
            read(first.experts[i]),
            read(second.experts[i]),
        )


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16],
    ids=str,
)
def test_experts_narrower_than_their_base(place, tmp_path, dtype):
    folders = [tmp_path / "0", tmp_path / "1"]
    for i, folder in enumerate(folders):
        save_expert(
            perturbed(place / "base", i),
            folder,
            dtype=dtype,
        )
    found = expand_experts(
        folders,
        3,
        tmp_path / "out",
        base=place / "base",
    )
    experts = [read(folder) for folder in folders]
    children, _ = reference(
        experts,
        tensors(place / "base"),
        found,
        {},
    )
    child = read(found.experts[2])
    for key, tensor in children[0][2].items():
        assert child[key].dtype == dtype
        # rounded to float32, then to the dtype
        rounded = relative_error(tensor.to(dtype), tensor)
        assert relative_error(child[key], tensor) <= 1.001 * rounded


def test_children_load_in_transformers_and_peft(place, tmp_path):
    whole, adapter = (
        expand_experts(given(place, kind), 4, tmp_path / kind, base=place / "base").experts[3]
        for kind in ("ffn", "lora")
    )
    assert open_expert(adapter).kind == "lora"
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert logits(peft.PeftModel.from_pretrained(model, adapter)).isfinite().all()


def test_random_parents(place, tmp_path):
    def parents_of(seed: int):
        found = expand_experts(
            given(place, "lora"),
            9,
            tmp_path / str(seed),
            base=place / "base",
            parents="random",
            seed=seed,
        )
        return [made.parents for made in found.children]

    parents = parents_of(0)
    for n, (i, j) in enumerate(parents):
        assert i < j < 3 + n
    assert len(set(parents)) > 2
    assert parents_of(1) != parents


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("expert-*/*")}


@pytest.mark.parametrize("kind", ["ffn", "lora"])
def test_after_a_kill_finished_children_are_kept(place, tmp_path, monkeypatch, kind):
    def expand(name: str):
        return expand_experts(
            given(place, kind),
            6,
            tmp_path / name,
            base=place / "base",
            seed=5,
        )

    expected = expand("whole")
    inner = upit_pool.Pool.child

    def die(self, mix):
        for i, pair in enumerate(inner(self, mix)):
            if len(self.experts) == 4 and i == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(upit_pool.Pool, "child", die)
    with pytest.raises(KeyboardInterrupt):
        expand("out")
    monkeypatch.undo()
    before = written(tmp_path / "out")
    assert {path.parent.name for path in before} == {"expert-3"}
    found = expand("out")
    assert before.items() <= written(tmp_path / "out").items()
    assert torch.equal(found.distance, expected.distance)
    for made, other in zip(found.children, expected.children, strict=True):
        assert made == other._replace(folder=tmp_path / "out" / other.folder.name)
        assert_equal(
            read(made.folder),
            read(other.folder),
        )
    before = written(tmp_path / "out")
    assert torch.equal(
        expand("out").distance,
        found.distance,
    )
    assert written(tmp_path / "out") == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"drop": 0.4},
        {"count": 4},
        {"base": "changed"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_children_of_another_call_are_replaced_only_if_asked(place, tmp_path, change):
    out = tmp_path / "out"
    settings = {"count": 5, "base": place / "base", "out": out}
    expand_experts(given(place, "ffn"), **settings)
    before = written(out)
    settings |= change
    if "base" in change:
        settings["base"] = tmp_path / "changed"
        perturbed(place / "base", 4).save_pretrained(settings["base"])
    with pytest.raises(ValueError, match=r"expert-\d.*(from other experts|would not create)"):
        expand_experts(given(place, "ffn"), **settings)
    assert written(out) == before
    found = expand_experts(given(place, "ffn"), **settings, overwrite=True)
    after = written(out)
    assert not before.items() & after.items()
    # no other files are left
    assert {path.parent for path in after} == {made.folder for made in found.children}


def edited(place: Path, tmp_path: Path, name: str) -> Path:
    """Make an expert that does not match the others."""
    folder = tmp_path / name
    if name == "narrow":
        dense("llama", hidden_size=16).save_pretrained(folder)
    elif name == "nan":
        model = perturbed(place / "base", 1)
        model.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.nan
        model.save_pretrained(folder)
    elif name == "rank-4":
        save_expert(
            peft.get_peft_model(
                perturbed(place / "base", 0),
                lora_of(rank=4),
            ),
            folder,
        )
    else:
        shutil.copytree(place / "lora-1", folder)
        config = read_json(folder / "adapter_config.json")
        config["use_dora"] = True
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"count": 2}, "but got 3 experts and count 2", id="fewer than the experts"),
        pytest.param({"experts": ["ffn-0"]}, "at least 2 experts, as a child has", id="one"),
        pytest.param({"experts": ["ffn-0", "lora-0"]}, "must be the same for all", id="kinds"),
        pytest.param({"experts": ["ffn-0", "narrow"]}, "with a wrong shape", id="another size"),
        pytest.param({"base": "lora-0"}, "Expected model.safetensors", id="not a base"),
        pytest.param({"experts": ["ffn-0", "nan"]}, "have NaN or infinite values", id="NaN"),
        pytest.param({"experts": ["lora-0", "rank-4"]}, "but is 4 for", id="another rank"),
        pytest.param({"experts": ["dora", "lora-0"]}, "uses DoRA", id="dora"),
        pytest.param({"metric": "l1"}, "metric must be", id="metric"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(place, tmp_path, change, words):
    def folder_of(name: str) -> Path:
        if (place / name).exists():
            return place / name
        return edited(place, tmp_path, name)

    arguments = {"experts": ["ffn-0", "ffn-1", "ffn-2"], "count": 5, "base": "base"} | change
    arguments["experts"] = [folder_of(name) for name in arguments["experts"]]
    arguments["base"] = folder_of(arguments["base"])
    with pytest.raises(ValueError, match=words):
        expand_experts(out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_nothing_but_children_is_replaced(place, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    for i in range(3):
        shutil.copytree(
            place / f"ffn-{i}",
            tmp_path / "all" / f"expert-{i + 2}",
        )
    shutil.copytree(
        place / "ffn-0",
        tmp_path / "mine" / "expert-3",
    )
    (tmp_path / "file").write_text("")
    inside = sorted((tmp_path / "all").iterdir())
    for name, experts, words in (
        ("notes", given(place, "ffn"), "contains notes.txt"),
        ("all", inside, "expert-3, which is one of the experts, which a child would replace"),
        ("mine", given(place, "ffn"), "expert-3, which is not a child of an expansion"),
        ("file", given(place, "ffn"), "file"),
    ):
        with pytest.raises(ValueError, match=words):
            expand_experts(
                experts,
                4,
                tmp_path / name,
                base=place / "base",
                overwrite=True,
            )


CHILD = """
import gc, sys
from pathlib import Path
import torch; torch.set_num_threads(1)
from moe_runtime.methods.upit import pool
from moe_runtime.methods.upit.checkpoints import save_expert
from moe_runtime.methods.upit.expansion import expand_experts
from tests.hf.tiny import dense
from tests.support import limited

out, limit = Path(sys.argv[1]), int(sys.argv[2])
pool.CHUNK = 1 << 19
for size, place in ((32, out / "warm"), (512, out)):
    model = dense("llama", hidden_size=size, intermediate_size=3 * size, num_hidden_layers=3)
    if place == out:
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        assert held > 2 * limit, held
        limited.limit_data(limit)
    for i in range(5):  # the first is the base
        save_expert(model, place / str(i), max_shard_size=2_000_000)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape[1:]) / 50)
    save_expert(model, place / "narrow", dtype=torch.bfloat16, max_shard_size=2_000_000)
    del model, parameter; gc.collect()
    if place == out:
        limited.limit_data(limit)
    experts = [place / str(i) for i in range(1, 5)]
    expand_experts(experts, 8, place / "all", base=place / "0", max_shard_size=2_000_000)
print("held" if limited.is_held(limit + (64 << 20)) else "no limit")
"""


@pytest.mark.slow
def test_4_experts_become_8_of_a_model_larger_than_the_memory_limit(tmp_path):
    """The 4 experts are saved from a model that does not fit in memory twice."""
    limit = 16 << 20
    done = limited.run(CHILD, tmp_path, limit)
    assert done.stdout.strip().endswith("held"), done.stderr[-2000:]
    children = sorted((tmp_path / "all").glob("expert-*"))
    assert [path.name for path in children] == ["expert-4", "expert-5", "expert-6", "expert-7"]
    assert sum(path.stat().st_size for path in children[3].glob("*.safetensors")) > 2 * limit
