"""moe_runtime.methods.upit.expansion: children against the equations in memory, what is read, what
is kept, bounded memory.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime import backends
from moe_runtime.methods.upit import expansion as upit_expansion
from moe_runtime.methods.upit import pool as upit_pool
from moe_runtime.methods.upit.checkpoints import save_expert
from moe_runtime.methods.upit.expansion import expand_experts
from moe_runtime.methods.upit.experts import open_expert
from tests.hf.tiny import dense, logits
from tests.methods.upit.test_experts import record_of, stirred
from tests.ops.test_expansion import child as thinned
from tests.support import limited
from tests.support.checkpoints import tensors
from tests.support.oracle import relative_error


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base, and three experts of it as whole models, as deltas and as adapters."""
    import peft

    folder = tmp_path_factory.mktemp("experts")
    dense("llama").save_pretrained(folder / "base")
    for i in range(3):
        model = stirred(folder / "base", i, "")
        save_expert(model, folder / f"ffn-{i}")
        save_expert(
            stirred(folder / "base", i),
            folder / f"delta-{i}",
            base=folder / "base",
            record=record_of(folder / "base"),
        )
        torch.manual_seed(i)
        config = peft.LoraConfig(
            r=3, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False
        )
        save_expert(
            peft.get_peft_model(model, config),
            folder / f"lora-{i}",
            record={"base": str(folder / "base")},
        )
    return folder


def given(place: Path, kind: str, count: int = 3) -> list[Path]:
    return [place / f"{kind}-{i}" for i in range(count)]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an expert of any kind."""
    with open_expert(folder) as expert:
        return {key: expert.get(key) for key in expert.keys()}


def reference(experts, base, found, *, metric="cosine", of="delta", drop=0.5, seed=0, rescale=True):
    """Algorithm 2's loop in float64, with the masks and the weights that the results name: pairs,
    distances, children.
    """
    pool = [{k: t.double() for k, t in tensors.items()} for tensors in experts]
    children = []
    mlp = [key for key in pool[0] if ".mlp." in key]
    zero = base is None or of == "weight"
    flat = lambda e: torch.cat([(e[k] - (0 if zero else base[k].double())).flatten() for k in mlp])  # noqa: E731

    def apart(a, b):
        a = flat(a)
        b = flat(b)
        if metric == "cosine":
            return 1 - (a @ b / a.norm() / b.norm()).item()
        return (a - b).norm().item()

    for made in found.children:
        pairs = {(i, j): apart(pool[i], pool[j]) for j in range(len(pool)) for i in range(j)}
        (j, k), (a, b) = max(sorted(pairs), key=pairs.get), made.weights
        new = {key: (pool[j][key] + pool[k][key]) / 2 for key in pool[0]}
        for key in mlp:
            new[key] = thinned(
                pool[j][key],
                pool[k][key],
                None if base is None else base[key],
                (a, b),
                drop,
                upit_expansion._seed(seed, len(pool)),
                key,
            )
        children.append(((j, k), pairs[j, k], new))
        pool.append({key: tensor.to(experts[0][key].dtype).double() for key, tensor in new.items()})
    return children, [[apart(x, y) for y in pool] for x in pool]


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("ffn", {}, id="ffn"),
        pytest.param(
            "ffn", {"metric": "l2", "of": "weight", "drop": 0.25, "seed": 7}, id="ffn-l2-of-weights"
        ),
        pytest.param("delta", {"seed": 1}, id="delta"),
        pytest.param("lora", {}, id="lora"),
        pytest.param("lora", {"metric": "l2", "drop": 0.9}, id="lora-l2"),
    ],
)
def test_children_are_those_of_the_equations(place, tmp_path, monkeypatch, kind, options):
    monkeypatch.setattr(upit_pool, "CHUNK", 1000)
    found = expand_experts(given(place, kind), 6, tmp_path / "out", base=place / "base", **options)
    base = None if kind == "lora" else tensors(place / "base")
    want, distance = reference(
        [read(folder) for folder in given(place, kind)], base, found, **options
    )
    assert found.experts == [
        *given(place, kind),
        *(tmp_path / "out" / f"expert-{i}" for i in (3, 4, 5)),
    ]
    for made, (parents, apart, new) in zip(found.children, want, strict=True):
        assert made.parents == parents and made.distance == pytest.approx(apart, rel=1e-5)
        assert sum(made.weights) == pytest.approx(1) and 0 < made.weights[0] < 1
        own = read(made.folder)
        assert own.keys() == new.keys()
        assert max(relative_error(own[key], new[key]) for key in new) < 1e-6
    torch.testing.assert_close(
        found.distance, torch.tensor(distance).double().fill_diagonal_(0), rtol=1e-5, atol=1e-7
    )
    assert len({made.weights for made in found.children}) == 3  # fresh ones for each


def test_children_have_their_parents_form(place, tmp_path):
    """A delta's child is a delta, with the bits that the child of whole models has; each loads in
    transformers or PEFT.
    """
    import peft

    for kind in ("delta", "lora"):
        expand_experts(given(place, kind, 2), 3, tmp_path / kind, base=place / "base")
        with open_expert(tmp_path / kind / "expert-2") as expert:
            assert expert.kind == kind
    for i in (0, 1):
        save_expert(stirred(place / "base", i), tmp_path / f"whole-{i}")
    whole = expand_experts(
        [tmp_path / "whole-0", tmp_path / "whole-1"], 3, tmp_path / "ffn", base=place / "base"
    )
    a = read(tmp_path / "delta" / "expert-2")
    b = read(whole.experts[2])
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert all(".mlp." in key for key in tensors(tmp_path / "delta" / "expert-2"))
    model = AutoModelForCausalLM.from_pretrained(whole.experts[2])
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "lora" / "expert-2")
    assert logits(adapted).isfinite().all()


def test_a_child_depends_on_no_layout(place, tmp_path, monkeypatch):
    options = {"base": place / "base", "seed": 3}
    want = [
        read(folder)
        for folder in expand_experts(given(place, "ffn"), 5, tmp_path / "a", **options).experts[3:]
    ]
    monkeypatch.setattr(upit_pool, "CHUNK", 700)
    for i in range(3):
        model = AutoModelForCausalLM.from_pretrained(place / f"ffn-{i}")
        model.save_pretrained(tmp_path / f"again-{i}", max_shard_size="9KB")
    again = expand_experts(
        [tmp_path / f"again-{i}" for i in range(3)],
        5,
        tmp_path / "b",
        max_shard_size="15KB",
        **options,
    )
    assert len(list((tmp_path / "b" / "expert-3").glob("*.safetensors"))) > 3
    for own, folder in zip(want, again.experts[3:], strict=True):
        assert all(torch.equal(own[key], tensor) for key, tensor in read(folder).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_narrower_than_their_base(place, tmp_path, dtype):
    folders = []
    for i in range(2):
        save_expert(stirred(place / "base", i), tmp_path / f"{i}", dtype=dtype)
        folders.append(tmp_path / f"{i}")
    found = expand_experts(folders, 3, tmp_path / "out", base=place / "base")
    want, _ = reference([read(folder) for folder in folders], tensors(place / "base"), found)
    own = read(found.experts[2])
    assert {tensor.dtype for tensor in own.values()} == {dtype}
    # rounded to float32, then to the dtype
    assert all(
        relative_error(own[k], t) <= 1.001 * relative_error(t.to(dtype), t)
        for k, t in want[0][2].items()
    )


@pytest.mark.parametrize(
    "options, same_as",
    [
        pytest.param({"drop": 0.0, "weights": (1, 0)}, 0, id="the first parent alone"),
        pytest.param({"drop": 0.0, "weights": (0, 1)}, 1, id="the second parent alone"),
        pytest.param({"drop": 1.0}, None, id="all dropped"),
    ],
)
def test_limits(place, tmp_path, options, same_as):
    found = expand_experts(
        given(place, "delta", 2), 3, tmp_path / "out", base=place / "base", **options
    )
    own = read(found.experts[2])
    want = read(place / "base" if same_as is None else place / f"delta-{same_as}")
    assert all(relative_error(own[key], want[key]) < 1e-6 for key in want)


def test_a_child_of_equal_parents(place, tmp_path):
    shutil.copytree(place / "delta-0", tmp_path / "twin")
    found = expand_experts(
        [place / "delta-0", tmp_path / "twin"], 3, tmp_path / "out", base=place / "base", drop=0.0
    )
    own = read(found.experts[2])
    want = read(place / "delta-0")
    assert all(relative_error(own[key], want[key]) < 1e-6 for key in want)
    assert found.distance.abs().max() < 1e-6


def test_random_parents_and_fixed_weights(place, tmp_path):
    options = {"base": place / "base", "parents": "random", "weights": (0.5, 0.5)}
    found = expand_experts(given(place, "lora"), 9, tmp_path / "out", **options)
    assert all(i < j < 3 + n for n, (i, j) in enumerate(made.parents for made in found.children))
    assert len({made.parents for made in found.children}) > 2
    assert all(made.weights == (0.5, 0.5) for made in found.children)
    other = expand_experts(given(place, "lora"), 9, tmp_path / "other", **options, seed=1)
    assert [made.parents for made in other.children] != [made.parents for made in found.children]


def test_without_rescaling(place, tmp_path):
    options = {"base": place / "base", "weights": (0.5, 0.5)}
    plain, scaled = (
        expand_experts(
            given(place, "lora", 2), 3, tmp_path / str(rescale), rescale=rescale, **options
        ).experts[2]
        for rescale in (False, True)
    )
    for key, tensor in read(plain).items():
        assert torch.equal(tensor if ".mlp." not in key else 2 * tensor, read(scaled)[key])


@pytest.mark.skipif(
    backends.why_not("triton", "gram", torch.device("cpu")) is not None, reason="no Triton here"
)
def test_backends_give_the_same_children(place, tmp_path, monkeypatch):
    monkeypatch.setattr(upit_pool, "CHUNK", 3000)
    found = [
        expand_experts(
            given(place, "lora"), 4, tmp_path / backend, base=place / "base", backend=backend
        )
        for backend in ("torch", "triton")
    ]
    a, b = (read(one.experts[3]) for one in found)
    assert all(torch.equal(a[key], b[key]) for key in a)
    torch.testing.assert_close(found[0].distance, found[1].distance, rtol=1e-5, atol=1e-7)


def test_experts_beyond_those_taken_at_once(place, tmp_path, monkeypatch):
    from moe_runtime.ops import expansion

    want = expand_experts(given(place, "ffn"), 6, tmp_path / "a", base=place / "base")
    monkeypatch.setattr(expansion, "FEW", 2)
    found = expand_experts(given(place, "ffn"), 6, tmp_path / "b", base=place / "base")
    assert [made.parents for made in found.children] == [made.parents for made in want.children]
    torch.testing.assert_close(found.distance, want.distance, rtol=1e-5, atol=1e-7)


# What is kept
def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("expert-*/*")}


@pytest.mark.parametrize("kind", ["ffn", "delta", "lora"])
def test_after_a_kill_finished_children_are_kept(place, tmp_path, monkeypatch, kind):
    options = {"base": place / "base", "seed": 5}
    want = expand_experts(given(place, kind), 6, tmp_path / "whole", **options)
    inner = upit_pool.Pool.child

    def die(self, mix, products):
        for i, pair in enumerate(inner(self, mix, products)):
            if len(self.experts) == 4 and i == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(upit_pool.Pool, "child", die)
    with pytest.raises(KeyboardInterrupt):
        expand_experts(given(place, kind), 6, tmp_path / "out", **options)
    monkeypatch.undo()
    before = written(tmp_path / "out")
    assert {path.parent.name for path in before} == {"expert-3"}
    found = expand_experts(given(place, kind), 6, tmp_path / "out", **options)
    assert before.items() <= written(tmp_path / "out").items()
    assert found.children == tuple(
        m._replace(folder=tmp_path / "out" / m.folder.name) for m in want.children
    )
    assert torch.equal(found.distance, want.distance)
    for a, b in zip(found.experts[3:], want.experts[3:], strict=True):
        assert all(torch.equal(tensor, read(b)[key]) for key, tensor in read(a).items())
    # all is there: nothing is read but what tells experts apart, nothing is written
    before = written(tmp_path / "out")
    monkeypatch.setattr(upit_pool.Pool, "_walk", None)
    again = expand_experts(given(place, kind), 6, tmp_path / "out", **options)
    assert written(tmp_path / "out") == before and torch.equal(again.distance, found.distance)


@pytest.mark.parametrize(
    "change, kept",
    [
        pytest.param({"seed": 1}, 0, id="another seed"),
        pytest.param({"drop": 0.4}, 0, id="another drop"),
        pytest.param({"rescale": False}, 0, id="without rescaling"),
        pytest.param({"weights": (0.4, 0.6)}, 0, id="other weights"),
        pytest.param({"overwrite": True}, 0, id="overwrite"),
        pytest.param({"of": "weight"}, 0, id="another comparison"),
        pytest.param({"max_shard_size": "1MB"}, 2, id="shards alone"),
        pytest.param({"count": 4}, 1, id="fewer"),
        pytest.param({"base": "changed"}, 0, id="another base"),
    ],
)
def test_children_of_another_call_are_replaced_only_if_asked(place, tmp_path, change, kept):
    stirred(place / "base", 4).save_pretrained(tmp_path / "changed")
    settings = {"count": 5, "base": place / "base"}
    expand_experts(given(place, "ffn"), out=tmp_path / "out", **settings)
    before = written(tmp_path / "out")
    settings |= change | ({"base": tmp_path / "changed"} if "base" in change else {})
    if not kept or "count" in change:
        if "overwrite" not in change:
            with pytest.raises(
                ValueError,
                match=(
                    r"expert-\d( in .* was created from other "
                    r"experts "
                    r"or "
                    r"with "
                    r"other|, "
                    r"which "
                    r"this call would not create)"
                ),
            ):
                expand_experts(given(place, "ffn"), out=tmp_path / "out", **settings)
            assert written(tmp_path / "out") == before
        settings["overwrite"], kept = True, 0
    found = expand_experts(given(place, "ffn"), out=tmp_path / "out", **settings)
    after = written(tmp_path / "out")
    assert len({path.parent for path in before if before[path] == after.get(path)}) == kept
    # and nothing lies beside them
    assert {path.parent for path in after} == {made.folder for made in found.children}


def test_the_summary(place, tmp_path):
    found = expand_experts(given(place, "ffn"), 4, tmp_path / "out", base=place / "base")
    summary = json.loads((tmp_path / "out" / "expansion.json").read_text())
    assert summary["experts"] == [str(path) for path in found.experts]
    assert summary["distance"] == found.distance.tolist()
    (made,) = summary["children"]
    assert (made["folder"], tuple(made["parents"])) == ("expert-3", found.children[0].parents)
    with open_expert(found.experts[3]) as expert:
        assert (
            expert.record["child"]["parents"] == made["parents"]
            and expert.record["child"]["drop"] == 0.5
        )


# What is refused
def spoil(folder: Path, value: float) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = value
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"count": 2}, "but got 3 experts and count 2", id="fewer than there are"),
        pytest.param({"experts": []}, "but got 0 experts", id="none"),
        pytest.param(
            {"experts": ["ffn-0"]},
            "Expected at least 2 experts, as a child has two parents",
            id="one",
        ),
        pytest.param(
            {"experts": ["ffn-0", "lora-0"]}, "must be the same for all experts", id="kinds"
        ),
        pytest.param(
            {"experts": ["ffn-0", "narrow"]}, "with a wrong shape", id="another architecture"
        ),
        pytest.param({"base": "narrow"}, "with a wrong shape", id="another base"),
        pytest.param({"base": "lora-0"}, "Expected model.safetensors", id="a base that is none"),
        pytest.param({"experts": ["ffn-0", "nan"]}, "have NaN or infinite values", id="NaN"),
        pytest.param({"experts": ["lora-0", "rank-4"]}, "but is 4 for", id="another rank"),
        pytest.param(
            {"experts": ["lora-0", "alpha-99"]}, "lora_alpha must be the same", id="another alpha"
        ),
        pytest.param({"experts": ["dora", "lora-0"]}, "uses DoRA", id="dora"),
        pytest.param({"metric": "l1"}, "metric must be", id="metric"),
        pytest.param({"of": "bias"}, "of must be", id="of"),
        pytest.param({"parents": "nearest"}, "parents must be", id="parents"),
        pytest.param({"drop": 1.5}, "drop must be", id="drop"),
        pytest.param(
            {"weights": (1, math.nan)},
            "weights must be two finite numbers or None, but got (1, nan)",
            id="weights",
        ),
        pytest.param({"seed": -1}, "seed must be", id="seed"),
        pytest.param({"max_shard_size": "few"}, "but got 'few'", id="shard size"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(place, tmp_path, change, words):
    dense("llama", hidden_size=16).save_pretrained(tmp_path / "narrow")
    spoil(Path(shutil.copytree(place / "ffn-1", tmp_path / "nan")), math.nan)
    for name, edit in (("alpha-99", {"lora_alpha": 99}), ("dora", {"use_dora": True})):
        folder = Path(shutil.copytree(place / "lora-1", tmp_path / name))
        config = json.loads((folder / "adapter_config.json").read_text()) | edit
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if change.get("experts") == ["lora-0", "rank-4"]:
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])
        save_expert(peft.get_peft_model(stirred(place / "base", 0), config), tmp_path / "rank-4")
    find = lambda name: place / name if (place / name).exists() else tmp_path / name  # noqa: E731
    arguments = {"experts": ["ffn-0", "ffn-1", "ffn-2"], "count": 5, "base": "base"} | change
    arguments |= {
        "experts": [find(name) for name in arguments["experts"]],
        "base": find(arguments["base"]),
    }
    with pytest.raises(ValueError) as error:
        expand_experts(out=tmp_path / "out", **arguments)
    assert words in str(error.value) and not (tmp_path / "out").exists()


def test_nothing_but_children_is_replaced(place, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="contains notes.txt"):
        expand_experts(
            given(place, "ffn"), 4, tmp_path / "out", base=place / "base", overwrite=True
        )
    folders = [
        shutil.copytree(place / f"ffn-{i}", tmp_path / "all" / f"expert-{i + 2}") for i in range(3)
    ]
    with pytest.raises(
        ValueError, match="contains the expert expert-3, which a child would replace"
    ):
        expand_experts(folders, 4, tmp_path / "all", base=place / "base", overwrite=True)
    shutil.copytree(place / "ffn-0", tmp_path / "mine" / "expert-3")
    with pytest.raises(ValueError, match="contains expert-3, which is not a child of an expansion"):
        expand_experts(
            given(place, "ffn"), 4, tmp_path / "mine", base=place / "base", overwrite=True
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Output folder .* is a file. Use a new folder"):
        expand_experts(given(place, "ffn"), 4, tmp_path / "file", base=place / "base")


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
    """And the 4 are saved from a model beside which there is no room for another."""
    done = limited.run(CHILD, tmp_path, 16 << 20)
    assert done.stdout.strip().endswith("held"), done.stderr[-2000:]
    assert sorted(path.name for path in (tmp_path / "all").glob("expert-*")) == [
        f"expert-{i}" for i in range(4, 8)
    ]
    size = sum(
        path.stat().st_size for path in (tmp_path / "all" / "expert-7").glob("*.safetensors")
    )
    assert size > 2 * (16 << 20)
