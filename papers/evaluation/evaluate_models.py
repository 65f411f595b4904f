"""The models of `python -m papers eval`: every kind of folder as a language model of lm-eval, with
recorded answers.

FOLDER               a model of transformers, dense or MoE, or one of ours, upcycled or with LoRA
                     experts: lm-eval's HFLM
FOLDER               with adapter_config.json (PEFT) on the base that it names; BASE+FOLDER, on
                     another base
BASE+FOLDER          with expert_cfg.json (ESFT)
FOLDER               with fuser_config.json (UltraFuser): `FusedLM`

`RecordedLM` wraps each of them: it renders chats, and appends every answer to a file, from which a
rerun reads it.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import check_choice, one_line
from moe_runtime.hf.common.sources import check_source
from moe_runtime.hf.dropin.experts import patch
from moe_runtime.hf.models.folders import read_config
from moe_runtime.hf.training import ranks
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import files_print, is_plain_name, read_json
from moe_runtime.io.prompts import TEMPLATES
from moe_runtime.io.rows import require
from moe_runtime.methods.esft import adapters
from moe_runtime.methods.lora.baseline import load_lora
from moe_runtime.methods.prompts import PROMPTS
from moe_runtime.methods.ultrafuser import folders

# files that identify a folder
KINDS = {"fused": folders.CONFIG, "esft": "expert_cfg.json", "peft": "adapter_config.json"}
# files of the folder that also has a folder for each model
RESULTS = ("results.json", "results.png")


class Model(NamedTuple):
    """A model as given to the command: a folder or a Hub id, or an adapter's folder and its
    base.
    """

    name: str
    folder: str
    kind: str  # model, or one of KINDS
    base: str | None = None

    def print(self) -> str:
        """Return a hash of the files of the model and of its base."""
        parts = [self.kind, files_print(self.folder), None, None]
        if self.base:
            parts[2] = files_print(self.base)
        if self.kind == "model" and not os.path.isdir(self.folder):
            parts[3] = self.folder
        if self.kind == "fused":
            for part in folders.read(self.folder).specialists:
                parts.append(files_print(part.path))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def find_models(words: Sequence[str]) -> list[Model]:
    """Parse words such as FOLDER, BASE+ADAPTER and NAME=FOLDER; raises ValueError for one that is
    not a model.
    """
    models: dict[str, Model] = {}
    for word in words:
        name, is_named, path = word.partition("=")
        if not is_named or os.path.exists(word):
            path = word
            name = _name(path)
        base, plus, folder = path.partition("+")
        if not plus or os.path.exists(path):
            base = None
            folder = path
        kind = _kind(folder, base)
        if kind == "peft" and base is None:
            base = read_json(Path(folder, KINDS["peft"])).get("base_model_name_or_path")
        if kind in ("esft", "peft") and not (base and isinstance(base, str)):
            raise ValueError(f"{word!r} is an adapter. Pass it with its base, as in BASE+{folder}")
        problem = None
        if name in models or not is_plain_name(name):
            problem = f"Model names must be unique file names, but got {name!r}. Name the models"
        elif name in RESULTS:
            problem = f"{name!r} is the name of a file of results. Name the model otherwise"
        if problem:
            raise ValueError(f"{problem}, as in NAME=FOLDER")
        models[name] = Model(name, folder, kind, base)
    return list(models.values())


def _name(path: str) -> str:
    """Return the last part of a path, with its parent if the last part is only "model"."""
    names = []
    for one in path.split("+"):
        folder = Path(one)
        if folder.is_dir():
            folder = folder.resolve()
        name = folder.name
        if name == "model" and folder.parent.name:
            name = f"{folder.parent.name}-model"
        names.append(name)
    return "+".join(names)


def _kind(folder: str, base: str | None) -> str:
    """Return the kind of a folder; raises ValueError if there is a base and the folder is not an
    adapter.
    """
    path = Path(folder)
    kinds = [kind for kind, mark in KINDS.items() if (path / mark).is_file()]
    if base is not None:
        for kind in kinds:
            if kind != "fused":
                return kind
        raise ValueError(
            f"Adapter {folder!r} has no {KINDS['esft']} or {KINDS['peft']}. Pass the folder of an "
            "adapter"
        )
    check_source(folder)
    is_model = (path / "config.json").is_file() or not path.is_dir()
    if is_model and "fused" not in kinds:
        return "model"
    if not kinds:
        raise ValueError(
            f"{folder!r} has no config.json, {', '.join(KINDS.values())}. Pass the folder of a "
            "model"
        )
    return kinds[0]


def tokenizer_of(model: Model, prompt: str):
    """Return a model's tokenizer, or its base's for an adapter without one, with the chat template
    of `prompt`.

    Raises ValueError if there is no tokenizer, or no chat template that `prompt` needs.
    """
    check_choice("prompt", prompt, tuple(PROMPTS))
    folder = model.folder
    whole = model.base or folder
    if model.kind == "fused":
        part = folders.read(folder).specialists[0]
        folder = part.tokenizer or part.path
    else:
        if os.path.isdir(whole):
            with Checkpoint(whole):
                read_config(whole)  # raises an error that names what is wrong with the folder
        if model.kind != "model" and not Path(folder, "tokenizer_config.json").is_file():
            folder = model.base
    files = (Path(folder, "tokenizer_config.json"), Path(folder, "tokenizer.json"))
    if os.path.isdir(folder) and not any(file.is_file() for file in files):
        raise ValueError(
            f"Model {model.name!r} has no tokenizer in {folder}. Save its tokenizer there"
        )
    tokenizer = ranks.load_tokenizer(folder, f"tokenizer of {model.name!r}")
    tokenizer.chat_template = TEMPLATES.get(prompt, tokenizer.chat_template)
    if prompt == "chat" and not tokenizer.chat_template and model.kind != "fused":
        raise ValueError(
            f"Model {model.name!r} has no chat template. Put a chat_template.jinja into {folder}, "
            "or pass --prompt plain"
        )
    return tokenizer


def load_lm(model: Model, tokenizer, dtype: str, batch_size: int):
    """Load a model as a language model of lm-eval, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model.kind == "fused":
        if dtype == "auto":
            dtype = None
        return FusedLM(folders.load(model.folder, dtype=dtype, device=device), batch_size)
    loaded = ranks.load_model(
        model.base or model.folder,
        dtype,
        name="model",
    )
    if model.kind == "esft":
        adapters.apply(loaded, model.folder)
    if model.kind == "peft":
        loaded = load_lora(loaded, model.folder)
    with contextlib.suppress(ValueError):  # dense: there is nothing to speed up
        patch(loaded)
    return require("lm_eval.models.huggingface", "eval").HFLM(
        loaded.to(device).eval(),
        backend="causal",
        tokenizer=tokenizer,
        batch_size=batch_size,
    )


class RecordedLM:
    """A model of lm-eval whose answers are appended to `path`, and which is loaded only if an
    answer is missing there.

    `progress(done, total)` counts the requests of a call.
    """

    rank = 0
    world_size = 1

    def __init__(
        self, model: Model, tokenizer, prompt: str, path: Path, load: Callable[[], object]
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.path = path
        self.is_rendered = False
        self.progress = lambda done, total: None
        # questions and answers, counted since they were set to 0
        self.truncated = 0
        self.cut = 0
        self.tokenizer_name = model.name
        self._load = functools.cache(load)
        self._done = 0
        self._total = 0
        self._answers = _read(path)

    def apply_chat_template(
        self, chat: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat as text to continue, with the tokenizer's template, or in the format of
        `FusedLM`.
        """
        if self.model.kind == "fused":
            return FUSED + json.dumps(chat)
        if self.prompt == "plain":
            text = self.tokenizer.bos_token or ""
            for i, turn in enumerate(chat):
                part = turn["content"]
                # few-shot examples: answers start on a new line and are followed by a blank line
                if len(chat) > 1:
                    part = part.rstrip("\n") + ("\n\n" if i % 2 else "\n")
                text += part
            return text
        try:
            return self.tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(
                f"The chat template of {self.model.name!r} failed: {one_line(error, 300)}"
            ) from error

    def generate_until(self, requests: list) -> list[str]:
        """Return the continuation of each context, up to a stop sequence; count those that reach
        the limit in `cut`.
        """
        answers = self._answered("generate_until", requests)
        for request, answer in zip(requests, answers, strict=True):
            limit = request.args[1].get("max_gen_toks", 256)
            count = len(self.tokenizer.encode(answer, add_special_tokens=False))
            # the answer's text may take slightly fewer tokens than were generated
            self.cut += count >= limit - limit // 32
        return answers

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Return the log probability of each continuation, and whether greedy decoding generates
        it.
        """
        return [*map(tuple, self._answered("loglikelihood", requests))]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Return the log probability of each text."""
        return self._answered("loglikelihood_rolling", requests)

    def add_partial(self, kind: str, args: Sequence, answer) -> None:
        """Record an answer; lm-eval's models call this on their cache_hook for each answer."""
        if not _is_sampled(args):
            key = _key(kind, args)
            self._answers[key] = answer
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "answer": answer}) + "\n")
        self._done += 1
        self.progress(self._done, self._total)

    def _answered(self, kind: str, requests: list) -> list:
        answers = {}  # index -> answer
        missing = {}  # index -> request
        for i, one in enumerate(requests):
            key = _key(kind, one.args)
            if key in self._answers and not _is_sampled(one.args):
                answers[i] = self._answers[key]
            else:
                missing[i] = one
        self._done = len(answers)
        self._total = len(requests)
        self.progress(self._done, self._total)
        if missing:
            lm = self._load()
            lm.cache_hook = self
            lm.add_bos_token = False if self.is_rendered else None
            unanswered = [*missing.values()]
            if kind == "generate_until":
                self._check_lengths(lm, unanswered)
            answers |= zip(
                missing,
                getattr(lm, kind)(unanswered, disable_tqdm=True),
                strict=True,
            )
        return [answers[i] for i in range(len(requests))]

    def _check_lengths(self, lm, requests: list) -> None:
        """Count the contexts that lm-eval truncates on the left; raises ValueError if no token of
        one would be left.
        """
        longest = max(one.args[1].get("max_gen_toks", 256) for one in requests)
        if longest >= lm.max_length:
            raise ValueError(
                f"Answers of {longest} tokens do not fit into the {lm.max_length} positions of "
                f"model {self.model.name!r}. Lower --max-new-tokens"
            )
        for one in requests:
            self.truncated += len(lm.tok_encode(one.args[0])) > lm.max_length - longest


def _is_sampled(args: Sequence) -> bool:
    return len(args) > 1 and isinstance(args[1], Mapping) and bool(args[1].get("do_sample"))


def _key(kind: str, args: Sequence) -> str:
    return hashlib.sha256(json.dumps([kind, *args]).encode()).hexdigest()


def _read(path: Path) -> dict:
    """Read the answers in a file; an incomplete last line of a killed process is removed."""
    answers = {}
    whole = 0
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                one = json.loads(line) if line.endswith(b"\n") else None
                answers[one["key"]] = one["answer"]
            except (ValueError, TypeError, KeyError):
                break
            whole += len(line)
        os.truncate(path, whole)
    return answers


FUSED = "\0chat "  # prefix of a context that is a chat as JSON; it occurs in no text


class FusedLM:
    """A fused model as a language model of lm-eval: each specialist reads a context in its own
    template.

    A context is a chat rendered by `RecordedLM`, or a text, which becomes the user's turn; a final
    turn of the assistant is the beginning of the answer. Context and continuation are tokenized
    separately, as in training.
    """

    rank = 0
    world_size = 1

    def __init__(self, fuser, batch_size: int):
        self.fuser = fuser
        self.batch_size = batch_size
        self.cache_hook = None
        self.max_length = math.inf
        for model in fuser.specialists:
            config = model.config.get_text_config()
            length = getattr(config, "max_position_embeddings", None) or 2048
            self.max_length = min(self.max_length, length)

    def tok_encode(self, context: str) -> list[int]:
        """Return the longest of the specialists' prompts with the beginning of the answer."""
        prompt, answer = self._ids(context)
        return max(prompt, key=len) + answer

    def _ids(self, context: str) -> tuple[list[list[int]], list[int]]:
        """Return the ids of a context for each specialist, and those of the answer's beginning."""
        if not context:  # as in lm-eval: BOS, or EOS
            return [[self._first()]] * len(self.fuser.names), []
        encoder = self.fuser.encoder
        chat = [{"role": "user", "content": context}]
        if context.startswith(FUSED):
            chat = json.loads(context.removeprefix(FUSED))
        begun = []
        if chat[-1]["role"] == "assistant":
            begun = encoder.answer(chat.pop()["content"], end=False)
        return encoder.prompt(chat), begun

    def _first(self) -> int:
        tokenizer = self.fuser.encoder.tokenizer
        return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def _batches(self, rows: list[tuple], group: Callable[[tuple], object]):
        """Yield batches of rows (place, prompts, answer, ...) of one group, the longest first."""
        groups: dict = {}
        for row in sorted(rows, key=lambda row: -len(max(row[1], key=len)) - len(row[2])):
            groups.setdefault(group(row), []).append(row)
        for alike in groups.values():
            for i in range(0, len(alike), self.batch_size):
                yield alike[i : i + self.batch_size]

    def _inputs(self, batch: list[tuple], has_answers: bool) -> dict:
        from accelerate.utils import send_to_device

        rows = []
        for _, prompts, answer, *_ in batch:
            row = {"prompt_ids": prompts}
            if has_answers:
                row["response_ids"] = answer
            rows.append(row)
        device = self.fuser.gate.score.weight.device
        return send_to_device(self.fuser.encoder.collate(rows), device)

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
        """Return the generated answers, without their given beginnings, up to a stop sequence."""
        rows = []
        for i, one in enumerate(requests):
            rows.append((i, *self._ids(one.args[0]), json.dumps(one.args[1])))
        out = [""] * len(requests)
        tokenizer = self.fuser.encoder.tokenizer
        # answers whose given beginnings have the same length are generated in one batch
        for batch in self._batches(rows, lambda row: (len(row[2]), row[3])):
            _, _, begun, how = batch[0]
            settings = {"do_sample": False} | json.loads(how)
            until = settings.pop("until", None) or []
            if isinstance(until, str):
                until = [until]
            settings["max_new_tokens"] = settings.pop("max_gen_toks", 256)
            if not settings["do_sample"]:
                settings.pop("temperature", None)
            if until:
                settings |= {"stop_strings": until, "tokenizer": tokenizer}
            inputs = self._inputs(batch, bool(begun))
            inputs.pop("labels", None)
            ids = self.fuser.generate(**inputs, **settings)[:, len(begun) :]
            answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
            for (i, *_), answer in zip(batch, answers, strict=True):
                out[i] = _cut(answer, until)
                self.cache_hook.add_partial(
                    "generate_until",
                    requests[i].args,
                    out[i],
                )
        return out

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log probability of each continuation, and whether each of its tokens is the
        most probable one.
        """
        rows = []
        for i, (context, continuation) in enumerate(one.args for one in requests):
            # lm-eval moves spaces to the continuation
            stripped = context if context.startswith(FUSED) else context.rstrip()
            prompt, begun = self._ids(stripped)
            answer = self.fuser.encoder.answer(context[len(stripped) :] + continuation, end=False)
            rows.append((i, prompt, begun + answer, len(answer)))
        return self._scores(rows, requests, "loglikelihood")

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list[float]:
        """Return the log probability of each text, in windows of `max_length` with as much context
        as fits.
        """
        utils = require("lm_eval.utils", "eval")
        rows = []
        texts = []  # the text of each row
        for i, one in enumerate(requests):
            # as lm-eval: with the tokenizer's own BOS
            ids = self.fuser.encoder.tokenizer.encode(*one.args)
            windows = utils.get_rolling_token_windows(
                ids,
                self._first(),
                self.max_length,
                1,
            )
            for context, continuation in map(utils.make_disjoint_window, windows):
                prompts = [context] * len(self.fuser.names)
                rows.append((len(rows), prompts, continuation, len(continuation)))
                texts.append(i)
        sums = [0.0] * len(requests)
        for i, (score, _) in zip(texts, self._scores(rows), strict=True):
            sums[i] += score
        for one, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", one.args, total)
        return sums

    @torch.no_grad()
    def _scores(
        self, rows: list[tuple], requests: Sequence = (), kind: str = ""
    ) -> list[tuple[float, bool]]:
        """Return for rows (place, prompts, answer, n) the log probability of the last n tokens of
        each answer.
        """
        out: list = [None] * len(rows)
        for batch in self._batches(rows, lambda row: None):
            inputs = self._inputs(batch, True)
            logits = self.fuser(**inputs, want_logits=True).logits.log_softmax(-1)
            for (i, _, answer, count), scores in zip(batch, logits, strict=True):
                last = slice(len(answer) - count, len(answer))
                ids = torch.tensor(answer, device=scores.device)[last]
                scores = scores[last]
                total = scores.gather(1, ids[:, None]).sum().item()
                out[i] = total, torch.equal(scores.argmax(-1), ids)
                if requests:
                    self.cache_hook.add_partial(
                        kind,
                        requests[i].args,
                        out[i],
                    )
        return out


def _cut(text: str, until: Sequence[str]) -> str:
    """Return a text up to the first of the stop sequences."""
    return text[: min((text.find(one) for one in until if one in text), default=len(text))]
