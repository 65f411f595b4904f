"""papers/evaluation/evaluate.py: answers against transformers' own, verdicts on known answers,
resumption, bad input.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime import cli
from moe_runtime.methods import lora, ultrafuser
from moe_runtime.methods.ultrafuser import folders as fused_folders
from papers.engine.corpora import domain_rows
from papers.engine.tiny import BOS
from papers.evaluation import evaluate as evaluation
from papers.evaluation import evaluate_models, evaluate_tasks
from papers.evaluation.evaluate import evaluate
from papers.evaluation.evaluate_models import RecordedLM, find_models, load_lm, tokenizer_of
from papers.evaluation.evaluate_tasks import TASKS, last_number, number_after_mark
from tests.hf import tiny
from tests.hf.dropin.test_layers import stock
from tests.methods.ultrafuser.fusers import specialist, tokenizer
from tests.support.esft_adapter import random_adapter
from tests.support.lora_models import shake

SIZES = {"vocab_size": len(tokenizer()), "max_position_embeddings": 512}
PARTS = r"(buys|gives|loses|puts them into|brings so many that \w+ has) (\d+)(?: to (\w+))?"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Every kind of folder, made once."""
    return make_folders(tmp_path_factory.mktemp("evaluate"))


def make_folders(home):
    """Write every kind of folder that can be evaluated."""
    made = {
        "dense": tiny.dense(**SIZES),
        "moe": tiny.upcycled(changes=SIZES),
        "mixtral": stock("mixtral", **SIZES),
    }
    made["lora-moe"] = tiny.dense(**SIZES)
    lora.to_lora_moe(
        made["lora-moe"], lora.lora_config(made["lora-moe"], num_experts=3, top_k=1), rank=2
    )
    shake(made["lora-moe"])
    for name, model in made.items():
        model.save_pretrained(home / name)
        tokenizer().save_pretrained(home / name)
    random_adapter(stock("mixtral", **SIZES)).save(home / "esft")
    base = AutoModelForCausalLM.from_pretrained(home / "dense")
    peft = get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    peft.save_pretrained(home / "peft")
    weights = load_file(home / "peft/adapter_model.safetensors")
    save_file(
        {k: torch.randn_like(t) for k, t in weights.items()},
        home / "peft/adapter_model.safetensors",
    )
    for name, seeds in {"fused": (0, 1), "twins": (0, 0)}.items():
        models = [specialist(seed, **SIZES) for seed in seeds]
        fuser = ultrafuser.UltraFuser(
            models, None if name == "fused" else ["{prompt}"] * 2, tokenizer=tokenizer()
        )
        fused_folders.save(fuser, home / name, "copy")
    return home


WORDS = {
    "dense": "{0}/dense",
    "moe": "{0}/moe",
    "lora-moe": "{0}/lora-moe",
    "mixtral": "{0}/mixtral",
    "fused": "{0}/fused",
    "mixtral+esft": "{0}/mixtral+{0}/esft",
    "peft": "{0}/peft",
    "dense+peft": "{0}/dense+{0}/peft",
}


class Request:
    """What lm-eval asks."""

    def __init__(self, *args):
        self.args = args


def recorded(word, path, prompt="plain", batch_size=2):
    (model,) = find_models([str(word)])
    words = tokenizer_of(model, prompt)
    return RecordedLM(model, words, prompt, path, lambda: load_lm(model, words, "auto", batch_size))


QUESTIONS = ["What is 2 + 3?", "def add(a, b):", "The quick brown fox jumps over"]


FEW = ("lora-moe", "fused", "mixtral+esft")  # the others take seconds that `make test` has not


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in FEW else pytest.mark.slow) for k in WORDS]
)
def test_every_kind_of_folder_answers_as_its_model_does(kind, home, tmp_path):
    # the oracle: one question at a time, without padding, by generate() of the model itself
    lm = recorded(WORDS[kind].format(home), tmp_path / "answers.jsonl")
    requests = [
        Request(lm.apply_chat_template([{"role": "user", "content": q}]), {"max_gen_toks": 6})
        for q in QUESTIONS
    ]
    answers = lm.generate_until(requests)
    loaded = load_lm(lm.model, lm.tokenizer, "auto", 1)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        if kind == "fused":
            assert answer == loaded.fuser.complete([question], max_new_tokens=6, do_sample=False)[0]
            continue
        ids = torch.tensor([tokenizer().encode(BOS + question, add_special_tokens=False)])
        with torch.no_grad():
            out = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer().decode(out, skip_special_tokens=True)
    if "peft" in kind or "+" in kind:  # the adapter says something
        base = recorded(lm.model.base, tmp_path / "base.jsonl")
        assert base.generate_until(requests) != answers


def fused_names(home):
    return sorted(path.name for path in (home / "twins/specialists").iterdir())


def solve(question: str) -> tuple[list[int], str]:
    """Work out a question of the domain `arithmetic` from its words; return every count and who
    asks for what.
    """
    name, count, thing = re.match(r"(\w+) has (\d+) (\w+)\.", question).groups()
    counts = [int(count)]
    for sentence in re.findall(r"[^.?]+\.", question)[1:]:
        verb, number, to = re.search(PARTS, sentence).groups()
        number = int(number)
        before = counts[-1]
        mine = sentence.split()[0] == name
        after = {
            "buys": before + number,
            "loses": before - number,
            "puts them into": before // number,
        }.get(verb)
        if verb == "gives":
            after = before - number if mine and to != name else before + number
        counts.append(before * number if after is None else after)
    return counts, f"{name} has {{}} {thing} now."


SOLVERS = {
    "right": lambda counts, said: f"{counts[0]} becomes {counts[-1]}. " + said.format(counts[-1]),
    "terse": lambda counts, said: str(counts[-1]),
    "off by one": lambda counts, said: (
        f"{counts[0]} becomes {counts[-1]}. " + said.format(counts[-1] + 1)
    ),
    "first number": lambda counts, said: (
        said.format(counts[0]) if counts[0] != counts[-1] else "none"
    ),
    "silent": lambda counts, said: "",
}


class Scripted:
    """A language model whose answers a function gives; `crash` is the number of answers after which
    it dies.
    """

    max_length = 4096
    cache_hook = None

    def __init__(self, answer, crash=None):
        self.answer = answer
        self.crash = crash
        self.asked = 0

    def tok_encode(self, text):
        return text.split()

    def generate_until(self, requests, disable_tqdm):
        out = []
        for one in requests:
            if self.asked == self.crash:
                raise KeyboardInterrupt
            self.asked += 1
            out.append(self.answer(one.args[0]))
            self.cache_hook.add_partial("generate_until", one.args, out[-1])
        return out


@pytest.fixture
def scripted(home, monkeypatch, tmp_path):
    """Evaluate scripted models, by name, in the place of the folder `dense`."""

    def run(answers, tasks, crash=None, **settings):
        lms = {name: Scripted(answer, crash) for name, answer in answers.items()}
        monkeypatch.setattr(evaluation, "load_lm", lambda model, *_: lms[model.name])
        settings = {"out": tmp_path / "out"} | settings
        report = evaluate([f"{name}={home / 'dense'}" for name in answers], tasks, **settings)
        run.asked = {name: lm.asked for name, lm in lms.items()}
        return report

    monkeypatch.chdir(tmp_path)
    return run


def test_sums_are_checked(scripted, tmp_path):
    answers = {
        n: lambda text, how=how: how(*solve(text.removeprefix(BOS))) for n, how in SOLVERS.items()
    }
    report = scripted(answers, "arithmetic", limit=40)
    scores = {score.model: score.score for score in report.scores}
    assert scores == {"right": 1, "terse": 1, "off by one": 0, "first number": 0, "silent": 0}
    verdicts = {one.model: (one.gained, one.lost, one.verdict) for one in report.comparisons}
    assert verdicts["terse"] == (0, 0, "no difference found")
    assert verdicts["silent"] == (
        0,
        40,
        "lower",
    )
    kept = [
        json.loads(line)
        for line in (tmp_path / "out/off by one/arithmetic.jsonl").read_text().splitlines()
    ]
    rows = domain_rows("arithmetic", limit=256).held_out[:40]
    assert [one["expected"] for one in kept] == [row["completion"] for row in rows]
    gold = [last_number(row["completion"]) for row in rows]
    assert [one["reason"] for one in kept] == [
        f"expected {n}, the answer has {n + 1}" for n in gold
    ]
    assert len({one.task for one in report.scores}) == 1
    assert (tmp_path / "out/results.json").exists()


@pytest.mark.slow
def test_the_paired_test_is_mcnemars_with_holms_correction(scripted, tmp_path):
    rows = [{"question": f"q{i}?", "answer": f"so\n#### {i}"} for i in range(30)]
    data = write(tmp_path / "gsm.jsonl", rows)
    known = {"ten": 10, "none": 0, "eleven": 11, "all": 30}
    solvers = {
        n: lambda text, k=k: f"#### {i}" if (i := int(text[len(BOS) + 1 : -1])) < k else "####"
        for n, k in known.items()
    }
    report = scripted(solvers, f"gsm8k={data}", reference="ten", shots=0)
    report = report._replace(
        comparisons=[one for one in report.comparisons if one.metric == "exact_match, strict-match"]
    )
    found = {one.model: one for one in report.comparisons}
    # all discordant problems on one side, two-sided
    p = {"none": 2 / 2**10, "eleven": 1.0, "all": 2 / 2**20}
    assert {name: one.p for name, one in found.items()} == pytest.approx(p)
    # of six comparisons, as there are two scores
    assert [found[name].p_corrected for name in ("all", "none", "eleven")] == pytest.approx(
        [6 * p["all"], 4 * p["none"], 1.0]
    )
    assert [found[n].verdict for n in ("none", "eleven", "all")] == [
        "lower",
        "no difference found",
        "higher",
    ]
    ten = next(score for score in report.scores if score.model == "ten")
    z2 = 1.959964**2  # Wilson's interval of 10 of 30
    middle = (10 + z2 / 2) / (30 + z2)
    half = math.sqrt(z2) / (30 + z2) * math.sqrt(10 * 20 / 30 + z2 / 4)
    assert (ten.low, ten.high) == pytest.approx((middle - half, middle + half), abs=1e-5)


def test_an_interrupted_evaluation_asks_for_the_rest_only(scripted, tmp_path):
    answers = {"a": lambda text: text[-3:], "b": lambda text: "7"}
    whole = scripted(answers, "arithmetic", limit=9, out=tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        scripted(answers, "arithmetic", limit=9, crash=5)
    record = next((tmp_path / "out/a").glob("answers-*.jsonl"))
    assert len(record.read_text().splitlines()) == 5
    with open(record, "a") as file:
        file.write('{"key": "cut by a ki')
    report = scripted(answers, "arithmetic", limit=9)
    assert scripted.asked == {"a": 4, "b": 9}
    assert report == whole._replace(settings=report.settings)
    assert json.loads((tmp_path / "out/results.json").read_text())["scores"]
    # whole lines again
    assert [json.loads(line)["key"] for line in record.read_text().splitlines()]
    again = scripted(answers, "arithmetic", limit=9)
    assert again == report
    assert scripted.asked == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("text", "strict", "last"),
    [
        ("so #### 72", 72, 72),
        ("#### $1,234.50.", 1234.5, 1234.5),
        ("####-3 and 4", -3, 4),
        ("72", None, 72),
        ("#### 1\n#### 2", 1, 2),
        ("5-3", None, 3),
        ("none", None, None),
        ("#### x 5", None, 5),
        ("#### 072.0", 72, 72),
    ],
)
def test_numbers_are_found(text, strict, last):
    assert (number_after_mark(text), last_number(text)) == (strict, last)


SCHOOL = {  # answers to a question whose gold answer is 18, and their strict and flexible score
    "so\n#### 18": (1, 1),
    "#### 18.": (1, 1),
    "#### **18**": (0, 1),
    r"\boxed{18}": (0, 1),
    "+18": (0, 1),
    "It is $18.": (0, 1),
    "18.00": (0, 0),
    "#### 18 and 19": (1, 0),
    "nineteen": (0, 0),
    "": (0, 0),
}


@pytest.mark.parametrize("shots", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_gsm8k_has_lm_evals_two_scores_and_counts_answers_that_are_cut(shots, scripted, tmp_path):
    import lm_eval

    theirs = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    assert theirs["filter_list"] == list(evaluate_tasks.SCHOOL_FILTERS)
    (metric,) = theirs["metric_list"]
    assert evaluate_tasks.SCHOOL_OPTIONS.items() <= metric.items()
    assert theirs["generation_kwargs"]["until"] == list(evaluate_tasks.SCHOOL_UNTIL)
    rows = [
        {"question": f"q{i}?", "answer": "9 + 9 = <<9+9=18>>18\n#### 18"}
        for i in range(len(SCHOOL))
    ]
    data = write(tmp_path / "gsm.jsonl", rows)
    asked = []

    def answer(text):
        asked.append(text)
        return list(SCHOOL)[int(re.findall(r"q(\d+)\?", text)[-1])]

    report = scripted({"dense": answer}, f"gsm8k={data}", shots=shots, max_new_tokens=12)
    assert [(score.metric, score.values) for score in report.scores] == [
        ("exact_match, strict-match", [float(strict) for strict, _ in SCHOOL.values()]),
        ("exact_match, flexible-extract", [float(flexible) for _, flexible in SCHOOL.values()]),
    ]
    cut = sum(len(tokenizer().encode(text, add_special_tokens=False)) >= 12 for text in SCHOOL)
    assert cut
    assert report.notes == [
        f"answers that reached --max-new-tokens and may be cut off: dense on gsm8k ({cut} of 10)"
    ]
    kept = [
        json.loads(line) for line in (tmp_path / "out/dense/gsm8k.jsonl").read_text().splitlines()
    ]
    assert [(one["exact_match"], one["exact_match, flexible-extract"]) for one in kept] == list(
        SCHOOL.values()
    )
    assert kept[2]["found, strict-match"] == "[invalid]"
    assert kept[2]["found, flexible-extract"] == "18"
    is_shown = asked[0].count("####") == 5 and asked[0].endswith("Question: q0?\nAnswer:\n")
    assert is_shown if shots is None else asked[0] == f"{BOS}q0?"


CODE = {
    "task_id": "T/0",
    "prompt": 'def add(a, b):\n    """Add.\n"""\n',
    "entry_point": "add",
    "canonical_solution": "",
}
CODE |= {"test": "def check(f):\n    assert f(2, 3) == 5\n    assert f(-1, 1) == 0\n"}
MBPP = {
    "task_id": 2,
    "text": "Add two numbers.",
    "code": "",
    "test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"],
}
BODIES = {
    "right": "return a + b",
    "wrong": "return a * b",
    "loops": "while True: pass",
    "exits": "raise SystemExit(0)",
}


@pytest.mark.parametrize("prompt", ["plain", pytest.param("chat", marks=pytest.mark.slow)])
def test_code_is_judged_by_running_it(prompt, scripted, tmp_path):
    humaneval = write(tmp_path / "h.jsonl", [CODE])
    mbpp = write(tmp_path / "m.jsonl", [MBPP])
    tasks = f"humaneval={humaneval},mbpp={mbpp}"
    if prompt == "plain":
        asked = {
            BOS + CODE["prompt"]: "    {}",
            BOS + '"""\nAdd two numbers.\nassert add(2, 3) == 5\n"""\n': "def add(a, b): {}",
        }
    else:
        asked = {
            "```python\n" + CODE["prompt"].strip(): "\n    {}",
            "```python\n": "def add(a, b): {}",
        }

    def answer(text, body):
        (form,) = [form for end, form in asked.items() if text.endswith(end)]
        return form.format(body)

    if prompt == "chat":
        bodies = BODIES
    else:
        bodies = {name: body for name, body in BODIES.items() if name != "loops"}
    report = scripted(
        {n: lambda text, b=b: answer(text, b) for n, b in bodies.items()},
        tasks,
        prompt=prompt,
        code_seconds=3,
    )
    scores = {(score.task, score.model): score.score for score in report.scores}
    assert scores == {
        (task, name): float(name == "right") for task in ("humaneval", "mbpp") for name in bodies
    }
    assert {score.metric for score in report.scores} == {"pass@1"}
    kept = json.loads((tmp_path / "out/exits/humaneval.jsonl").read_text())
    assert kept["id"] == "T/0"
    assert "SystemExit" in kept["reason"]


def test_intents_are_compared_as_json(scripted, tmp_path):
    rows = [
        {"prompt": "User: on?\n\nAssistant:", "raw_answers": ['{"a": 1, "b": [2]}'], "answers": ""}
    ] * 2
    data = write(tmp_path / "intent.jsonl", rows)
    answers = {
        "same": '{"b": [2],  "a": 1}',
        "fraction": '{"a": 1.0, "b": [2.0]}',
        "order": '{"b": 2, "a": 1}',
        "text": "a 1",
    }
    report = scripted({n: lambda text, a=a: a for n, a in answers.items()}, f"intent={data}")
    assert [score.score for score in report.scores] == [1, 1, 0, 0]
    assert (
        json.loads((tmp_path / "out/same/intent.jsonl").read_text().splitlines()[0])["asked"]
        == BOS + "on?"
    )


YAML = """
task: smoke
dataset_path: json
dataset_kwargs: {data_files: {test: smoke.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_a_yaml_task_and_shots_from_the_command_line(home, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke.yaml").write_text(YAML)
    write(
        tmp_path / "smoke.jsonl", [{"question": q, "label": i % 2} for i, q in enumerate(QUESTIONS)]
    )
    write(
        tmp_path / "sums.jsonl",
        [{"prompt": f"{i} and 1?", "completion": f"{i + 1}"} for i in range(5)],
    )
    tasks = "smoke.yaml,arithmetic=sums.jsonl"
    words = [
        "papers",
        "eval",
        str(home / "dense"),
        str(home / "moe"),
        "--tasks",
        tasks,
        "--shots",
        "2",
        "--out",
        "out",
    ]
    monkeypatch.setattr("sys.argv", [*words, "--max-new-tokens", "4", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main("papers.cli")
    found = json.loads(capsys.readouterr().out)
    assert not end.value.code
    assert (tmp_path / "out/results.png").stat().st_size > 1000
    assert [(s["task"], s["model"], s["problems"]) for s in found["scores"]] == [
        ("smoke", "dense", 3),
        ("smoke", "moe", 3),
        ("arithmetic", "dense", 3),
        ("arithmetic", "moe", 3),
    ]
    kept = [
        json.loads(line)
        for line in (tmp_path / "out/dense/arithmetic.jsonl").read_text().splitlines()
    ]
    assert [one["asked"] for one in kept] == [
        f"{BOS}0 and 1?\n1\n\n1 and 1?\n2\n\n{i} and 1?\n" for i in (2, 3, 4)
    ]
    lm = recorded(home / "dense", tmp_path / "again.jsonl")
    choices = [
        lm.loglikelihood([Request(QUESTIONS[0], f" {word}")])[0][0] for word in ("yes", "no")
    ]
    first = json.loads((tmp_path / "out/dense/smoke.jsonl").read_text().splitlines()[0])
    assert [one[0] for one in first["answer"]] == pytest.approx(choices)
    assert first["acc"] == float(choices[0] > choices[1])


def test_what_cannot_be_evaluated_is_said_before_a_model_is_loaded(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    tiny.dense(**SIZES).save_pretrained(tmp_path / "bare")
    tiny.dense(**SIZES).save_pretrained(tmp_path / "mute")
    words = tokenizer()
    template = words.chat_template
    words.chat_template = None
    words.save_pretrained(tmp_path / "mute")
    words.chat_template = template
    write(
        tmp_path / "bad.jsonl",
        [{"question": "q", "answer": "#### 1"}, {"question": "q", "solution": "1"}],
    )
    write(tmp_path / "unmarked.jsonl", [{"question": "q", "answer": "1"}])
    (tmp_path / "bad.yaml").write_text(YAML.replace("smoke.jsonl", "absent.jsonl"))
    (tmp_path / "up.yaml").write_text(re.sub("task: .*", "task: ../up", YAML))
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed/adapter_config.json").write_text('{"base_model_name_or_path": ["base"]}')
    (tmp_path / "code.yaml").write_text(YAML + "unsafe_code: true\n")
    write(tmp_path / "smoke.jsonl", [{"question": "q", "label": 0}])
    dense = str(home / "dense")
    cases = [
        ([dense], "sums=x.jsonl", {}, "Task 'sums=x.jsonl' is unknown. Use gsm8k"),
        ([dense], "absent.yaml", {}, "an existing YAML file"),
        ([dense], "", {}, "tasks must be one or more"),
        ([dense], "arithmetic,arithmetic", {}, "different tasks"),
        ([dense], "gsm8k=absent.jsonl", {}, "Task file 'absent.jsonl' is not an existing .jsonl"),
        (
            [dense],
            "gsm8k=bad.jsonl",
            {},
            "bad.jsonl has question, solution in example 2, but gsm8k expects question",
        ),
        ([dense], "gsm8k=unmarked.jsonl", {}, "which holds ####"),
        ([dense], "humaneval=bad.jsonl", {}, "expects prompt, test and entry_point"),
        ([dense], "mbpp=bad.jsonl", {}, "expects text"),
        ([dense], "intent", {}, "Task intent requires a file"),
        ([dense], "bad.yaml", {}, "Task 'bad' cannot be built"),
        ([dense], "code.yaml", {}, "would run code without limits"),
        (["empty"], "arithmetic", {}, "'empty' has no config.json"),
        (["bare"], "arithmetic", {}, "Model 'bare' has no tokenizer in bare"),
        (
            ["mute"],
            "arithmetic",
            {"prompt": "chat"},
            "Model 'mute' has no chat template. .* or pass --prompt plain",
        ),
        (
            [str(home / "esft")],
            "arithmetic",
            {},
            "is an adapter. Pass it with its base, as in BASE",
        ),
        (
            [f"{dense}+{dense}"],
            "arithmetic",
            {},
            "Adapter .* has no expert_cfg.json or adapter_config.json",
        ),
        (
            [dense, dense],
            "arithmetic",
            {},
            "must be unique file names, but got 'dense'.*NAME=FOLDER",
        ),
        ([f"../x={dense}"], "arithmetic", {}, "must be unique file names"),
        (
            [f"results.json={dense}"],
            "arithmetic",
            {},
            "'results.json' is the name of a file of results",
        ),
        (["listed"], "arithmetic", {}, "'listed' is an adapter. Pass it with its base"),
        ([dense], "up.yaml", {}, "Task names must be plain file names, .* but got '../up'"),
        ([dense], "arithmetic", {"reference": "other"}, "reference must be"),
        ([dense], "arithmetic", {"prompt": "loud"}, "prompt must be"),
        ([dense], "arithmetic", {"limit": 0}, "limit must be"),
        (
            [dense],
            "arithmetic",
            {"shots": 256},
            "shots must be below the 256 problems of arithmetic, but got 256",
        ),
        ([dense], "arithmetic", {"dtype": "int8"}, "dtype must be"),
    ]
    monkeypatch.setattr(evaluation, "load_lm", lambda *_: pytest.fail("a model was loaded"))
    for models, tasks, settings, says in cases:
        with pytest.raises(ValueError, match=says):
            evaluate(models, tasks, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # lm-eval reads some ten thousand files of its own tasks
def test_an_unknown_task_is_said(home, tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            "Task 'no_such_task' is unknown. Use gsm8k, humaneval, mbpp, arithmetic, intent, "
            "json, function, a YAML"
        ),
    ):
        evaluate([str(home / "dense")], "no_such_task", tmp_path / "out")


@pytest.mark.slow
def test_answers_longer_than_the_model_and_questions_that_are_cut(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="into the 512 positions of model 'dense'. Lower --max-new-tokens"
    ):
        evaluate([str(home / "dense")], "arithmetic", "out", max_new_tokens=512)
    report = evaluate([str(home / "dense")], "arithmetic", "out", max_new_tokens=500, limit=1)
    assert report.notes == [
        "questions longer than the context, truncated on the left: dense on arithmetic (1)",
        "answers that reached --max-new-tokens and may be cut off: dense on arithmetic (1 of 1)",
    ]


@pytest.mark.slow
def test_models_of_two_tokenizers_are_compared_by_problems(scripted, home, tmp_path, monkeypatch):
    from papers.engine.tiny import train_tokenizer

    tiny.dense(**SIZES).save_pretrained(tmp_path / "foreign")
    train_tokenizer(["other words altogether"] * 4, 270).save_pretrained(tmp_path / "foreign")
    monkeypatch.setattr(evaluation, "load_lm", lambda *_: Scripted(lambda text: "1"))
    report = evaluate(
        [str(home / "dense"), str(tmp_path / "foreign")], "arithmetic", tmp_path / "out", limit=3
    )
    assert report.notes == [
        "foreign and dense have different tokenizers, so they are compared by problems, not tokens"
    ]
    assert len(report.comparisons) == 1


def test_the_tables_of_the_modules_name_what_there_is():
    assert set(TASKS) <= set(re.findall(r"^(\w+) ", evaluate_tasks.__doc__, re.MULTILINE))
    assert set(evaluate_models.KINDS.values()) <= set(
        re.findall(r"\w+\.json", evaluate_models.__doc__)
    )
