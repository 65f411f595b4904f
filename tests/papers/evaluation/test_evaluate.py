"""papers/evaluation/evaluate.py: answers against transformers' own, scores of known answers,
resuming, bad input.
"""

import copy
import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from moe_runtime import cli
from moe_runtime.io.files import read_json
from moe_runtime.methods import lora, ultrafuser
from moe_runtime.methods.ultrafuser import folders as fused_folders
from papers.engine.tiny import BOS
from papers.evaluation import evaluate as evaluation
from papers.evaluation.evaluate import evaluate
from papers.evaluation.evaluate_models import RecordedLM, find_models, load_lm, tokenizer_of
from tests.hf import tiny
from tests.hf.dropin.test_layers import stock
from tests.methods.ultrafuser.fusers import specialist, tokenizer
from tests.support.esft_adapter import random_adapter
from tests.support.lora_models import shake

SIZES = {
    "vocab_size": len(tokenizer()),
    "max_position_embeddings": 512,
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of every kind, created once."""
    return make_folders(tmp_path_factory.mktemp("evaluate"))


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_folders(home):
    """Write a folder of every kind that can be evaluated."""
    made = {
        "dense": tiny.dense(**SIZES),
        "moe": tiny.upcycled(changes=SIZES),
        "mixtral": stock("mixtral", **SIZES),
        "lora-moe": tiny.dense(**SIZES),
    }
    config = lora.lora_config(
        made["lora-moe"],
        num_experts=3,
        top_k=1,
    )
    lora.to_lora_moe(made["lora-moe"], config, rank=2)
    shake(made["lora-moe"])
    for name, model in made.items():
        model.save_pretrained(home / name)
        tokenizer().save_pretrained(home / name)
    random_adapter(stock("mixtral", **SIZES)).save(home / "esft")
    base = AutoModelForCausalLM.from_pretrained(home / "dense")
    peft = get_peft_model(
        base,
        LoraConfig(
            r=2,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
        ),
    )
    for parameter in peft.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(home / "peft")
    specialists = [specialist(seed, **SIZES) for seed in (0, 1)]
    fuser = ultrafuser.UltraFuser(
        specialists,
        None,
        tokenizer=tokenizer(),
    )
    fused_folders.save(fuser, home / "fused", "copy")
    return home


def ask(question: str, lm) -> "Request":
    messages = [{"role": "user", "content": question}]
    return Request(lm.apply_chat_template(messages), {"max_gen_toks": 6})


WORDS = {
    "dense": "{0}/dense",
    "moe": "{0}/moe",
    "lora-moe": "{0}/lora-moe",
    "fused": "{0}/fused",
    "mixtral+esft": "{0}/mixtral+{0}/esft",
    "dense+peft": "{0}/dense+{0}/peft",
}


class Request:
    """A request of lm-eval."""

    def __init__(self, *args):
        self.args = args


def recorded(word, path, prompt="plain", batch_size=2):
    (model,) = find_models([str(word)])
    words = tokenizer_of(model, prompt)
    return RecordedLM(
        model,
        words,
        prompt,
        path,
        lambda: load_lm(
            model,
            words,
            "auto",
            batch_size,
        ),
    )


QUESTIONS = ["What is 2 + 3?", "def add(a, b):", "The quick brown fox jumps over"]


FEW = ("lora-moe", "fused", "mixtral+esft")  # the others take too long for `make test`


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in FEW else pytest.mark.slow) for k in WORDS]
)
def test_every_kind_of_folder_answers_as_its_model_does(kind, home, tmp_path):
    # the oracle: one question at a time, without padding, with generate() of the model itself
    lm = recorded(WORDS[kind].format(home), tmp_path / "answers.jsonl")
    requests = [ask(question, lm) for question in QUESTIONS]
    answers = lm.generate_until(requests)
    loaded = load_lm(
        lm.model,
        lm.tokenizer,
        "auto",
        1,
    )
    greedy = {"max_new_tokens": 6, "do_sample": False}
    for question, answer in zip(QUESTIONS, answers, strict=True):
        if kind == "fused":
            assert [answer] == loaded.fuser.complete([question], **greedy)
            continue
        ids = torch.tensor([tokenizer().encode(BOS + question, add_special_tokens=False)])
        with torch.no_grad():
            out = loaded.model.generate(ids, **greedy)[0, ids.shape[1] :]
        assert answer == tokenizer().decode(out, skip_special_tokens=True)
    if "peft" in kind or "+" in kind:  # the adapter changes the answer
        base = recorded(lm.model.base, tmp_path / "base.jsonl")
        assert base.generate_until(requests) != answers


def numbered(text: str) -> int:
    """Return the number that a question of `sums_file` starts with."""
    return int(re.search(r"(\d+) and 1\?", text)[1])


def sums_file(path, count: int):
    """Write questions whose answers are their numbers plus one."""
    rows = [
        {
            "prompt": f"{i} and 1?",
            "completion": f"It is {i + 1}.",
        }
        for i in range(count)
    ]
    return write(path, rows)


class Scripted:
    """A language model whose answers come from a function; `crash` is the number of answers after
    which it fails.
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
            self.cache_hook.add_partial(
                "generate_until",
                one.args,
                out[-1],
            )
        return out


@pytest.fixture
def scripted(home, monkeypatch, tmp_path):
    """Evaluate scripted models, by name, in place of the folder `dense`."""

    def run(answers, tasks, crash=None, **settings):
        lms = {name: Scripted(answer, crash) for name, answer in answers.items()}
        monkeypatch.setattr(evaluation, "load_lm", lambda model, *_: lms[model.name])
        settings = {"out": tmp_path / "out"} | settings
        report = evaluate(
            [f"{name}={home / 'dense'}" for name in answers],
            tasks,
            **settings,
        )
        run.asked = {name: lm.asked for name, lm in lms.items()}
        return report

    monkeypatch.chdir(tmp_path)
    return run


def test_an_interrupted_evaluation_asks_for_the_rest_only(scripted, tmp_path):
    answers = {
        "a": lambda text: text[-3:],
        "b": lambda text: "7",
    }
    whole = scripted(
        answers,
        "arithmetic",
        limit=9,
        out=tmp_path / "other",
    )
    with pytest.raises(KeyboardInterrupt):
        scripted(
            answers,
            "arithmetic",
            limit=9,
            crash=5,
        )
    record = next((tmp_path / "out/a").glob("answers-*.jsonl"))
    assert len(record.read_text().splitlines()) == 5
    with open(record, "a") as file:
        file.write('{"key": "cut by a ki')
    report = scripted(answers, "arithmetic", limit=9)
    assert scripted.asked == {"a": 4, "b": 9}
    assert report == whole._replace(settings=report.settings)
    assert read_json(tmp_path / "out/results.json")["scores"]
    # complete lines again
    assert [json.loads(line)["key"] for line in record.read_text().splitlines()]
    again = scripted(answers, "arithmetic", limit=9)
    assert again == report
    assert scripted.asked == {"a": 0, "b": 0}


FUNCTION = "def add(a, b): {}"


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
    "exits": "raise SystemExit(0)",
}


def test_code_is_judged_by_running_it(scripted, tmp_path):
    humaneval = write(tmp_path / "h.jsonl", [CODE])
    mbpp = write(tmp_path / "m.jsonl", [MBPP])
    asserts = '"""\nAdd two numbers.\nassert add(2, 3) == 5\n"""\n'
    forms = {BOS + CODE["prompt"]: "    {}", BOS + asserts: FUNCTION}

    def writes(body: str):
        def answer(text):
            (form,) = [form for end, form in forms.items() if text.endswith(end)]
            return form.format(body)

        return answer

    models = {name: writes(body) for name, body in BODIES.items()}
    tasks = f"humaneval={humaneval},mbpp={mbpp}"
    report = scripted(
        models,
        tasks,
        code_seconds=3,
    )
    assert len(report.scores) == 2 * len(models)
    for score in report.scores:
        assert score.metric == "pass@1"
        assert score.score == (score.model == "right"), score
    (stored,) = lines_of(tmp_path / "out/exits/humaneval.jsonl")
    assert stored["id"] == "T/0"
    assert "SystemExit" in stored["reason"]


def test_intents_are_compared_as_json(scripted, tmp_path):
    gold = '{"a": 1, "b": [2]}'
    row = {
        "prompt": "User: on?\n\nAssistant:",
        "raw_answers": [gold],
        "answers": "",
    }
    data = write(tmp_path / "intent.jsonl", [row] * 2)
    report = scripted(
        {
            "same": lambda text: '{"b": [2],  "a": 1}',
            "fraction": lambda text: '{"a": 1.0, "b": [2.0]}',
            "order": lambda text: '{"b": 2, "a": 1}',
            "text": lambda text: "a 1",
        },
        f"intent={data}",
    )
    assert [score.score for score in report.scores] == [1, 1, 0, 0]
    assert lines_of(tmp_path / "out/same/intent.jsonl")[0]["asked"] == BOS + "on?"


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
    rows = [{"question": q, "label": i % 2} for i, q in enumerate(QUESTIONS)]
    write(tmp_path / "smoke.jsonl", rows)
    sums_file(tmp_path / "sums.jsonl", 5)
    options = "--tasks smoke.yaml,arithmetic=sums.jsonl --shots 2 --max-new-tokens 4 --json"
    words = [
        "eval",
        str(home / "dense"),
        str(home / "moe"),
        "--out",
        "out",
        *options.split(),
    ]
    monkeypatch.setattr("sys.argv", ["papers", *words])
    with pytest.raises(SystemExit) as end:
        cli.main("papers.cli")
    assert not end.value.code
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert (tmp_path / "out/results.png").stat().st_size > 1000
    assert [(score["task"], score["model"], score["problems"]) for score in scores] == [
        ("smoke", "dense", 3),
        ("smoke", "moe", 3),
        ("arithmetic", "dense", 3),
        ("arithmetic", "moe", 3),
    ]
    shots = f"{BOS}0 and 1?\nIt is 1.\n\n1 and 1?\nIt is 2.\n\n"
    for i, one in enumerate(lines_of(tmp_path / "out/dense/arithmetic.jsonl"), 2):
        assert one["asked"] == f"{shots}{i} and 1?\n"


@pytest.fixture(scope="module")
def bad(home, tmp_path_factory):
    """A folder of tasks and models that cannot be evaluated."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("bare", "mute"):
        tiny.dense(**SIZES).save_pretrained(folder / name)
    words = copy.deepcopy(tokenizer())
    words.chat_template = None
    words.save_pretrained(folder / "mute")
    rows = [{"question": "q", "answer": "#### 1"}, {"question": "q", "solution": "1"}]
    write(folder / "bad.jsonl", rows)
    write(folder / "smoke.jsonl", [{"question": "q", "label": 0}])
    (folder / "up.yaml").write_text(re.sub("task: .*", "task: ../up", YAML))
    (folder / "code.yaml").write_text(YAML + "unsafe_code: true\n")
    (folder / "dense").symlink_to(home / "dense")
    (folder / "esft").symlink_to(home / "esft")
    return folder


@pytest.mark.parametrize(
    "models, tasks, settings, says",
    [
        ("dense", "sums=x.jsonl", {}, "Task 'sums=x.jsonl' is unknown. Use gsm8k"),
        ("dense", "gsm8k=bad.jsonl", {}, "bad.jsonl has question, solution in example 2"),
        ("dense", "humaneval=bad.jsonl", {}, "expects prompt, test and entry_point"),
        ("dense", "code.yaml", {}, "would run code without limits"),
        ("dense", "up.yaml", {}, "Task names must be plain file names, .* but got '../up'"),
        ("bare", "arithmetic", {}, "Model 'bare' has no tokenizer in bare"),
        ("mute", "arithmetic", {"prompt": "chat"}, "Model 'mute' has no chat template"),
        ("esft", "arithmetic", {}, "is an adapter. Pass it with its base, as in BASE"),
        ("dense+dense", "arithmetic", {}, "has no expert_cfg.json or adapter_config.json"),
        ("../x=dense", "arithmetic", {}, "must be unique file names"),
        ("dense", "arithmetic", {"shots": 256}, "shots must be below the 256 problems"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_a_model_is_loaded(
    bad, tmp_path, monkeypatch, models, tasks, settings, says
):
    monkeypatch.chdir(bad)
    monkeypatch.setattr(evaluation, "load_lm", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=says):
        evaluate(
            models.split(),
            tasks,
            tmp_path / "out",
            **settings,
        )
    assert not (tmp_path / "out").exists()
