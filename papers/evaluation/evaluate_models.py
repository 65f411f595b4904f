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
import hashlib
import json
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
        parts = [self.kind, files_print(self.folder), files_print(self.base) if self.base else None]
        parts += [self.folder if self.kind == "model" and not os.path.isdir(self.folder) else None]
        if self.kind == "fused":
            for part in folders.locate(self.folder, folders.read(self.folder), {}):
                parts.append(files_print(part.path))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def find_models(words: Sequence[str]) -> list[Model]:
    """Parse words such as FOLDER, BASE+ADAPTER and NAME=FOLDER; raises ValueError for one that is
    not a model.
    """
    models = []
    for word in words:
        name, is_named, rest = word.partition("=") if not os.path.exists(word) else ("", "", word)
        place = rest if is_named else word
        if not os.path.exists(place):
            base, plus, folder = place.partition("+")
        else:
            base, plus, folder = (None, "", place)
        base, folder = (base, folder) if plus else (None, place)
        kind = _kind(folder, base)
        if kind == "peft" and base is None:
            base = read_json(Path(folder, KINDS["peft"])).get("base_model_name_or_path")
        if kind in ("esft", "peft") and not (base and isinstance(base, str)):
            raise ValueError(f"{word!r} is an adapter. Pass it with its base, as in BASE+{folder}")
        models.append(Model(name if is_named else _name(place), folder, kind, base))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1 or not is_plain_name(name):
            raise ValueError(
                f"Model names must be unique file names, but got {name!r}. Name the models, as in "
                "NAME=FOLDER"
            )
        if name in RESULTS:
            raise ValueError(
                f"{name!r} is the name of a file of results. Name the model otherwise, as in "
                "NAME=FOLDER"
            )
    return models


def _name(place: str) -> str:
    """Return the last part of a path, with its parent if the last part is generic, such as
    "model".
    """
    parts = []
    for one in place.split("+"):
        path = Path(os.path.realpath(one) if os.path.isdir(one) else one)
        parts.append(
            f"{path.parent.name}-{path.name}"
            if path.name == "model" and path.parent.name
            else path.name
        )
    return "+".join(parts)


def _kind(folder: str, base: str | None) -> str:
    """Return the kind of a folder; raises ValueError if there is a base and the folder is not an
    adapter.
    """
    path = Path(folder)
    kinds = []
    for kind, mark in KINDS.items():
        if (path / mark).is_file():
            kinds.append(kind)
    is_model = (path / "config.json").is_file() or not path.is_dir()
    if base is not None:
        kinds = [kind for kind in kinds if kind != "fused"]
        if not kinds:
            raise ValueError(
                f"Adapter {folder!r} has no {KINDS['esft']} or {KINDS['peft']}. Pass the folder of "
                "an adapter"
            )
        return kinds[0]
    for source in (folder, base):
        if source is not None:
            check_source(source)
    if not kinds and not is_model:
        raise ValueError(
            f"{folder!r} has no config.json, {', '.join(KINDS.values())}. Pass the folder of a "
            "model"
        )
    return kinds[0] if kinds and ("fused" in kinds or not is_model) else "model"


def tokenizer_of(model: Model, prompt: str):
    """Return a model's tokenizer, or its base's for an adapter without one, with the chat template
    of `prompt`.

    Raises ValueError if there is no tokenizer, or no chat template that `prompt` needs.
    """
    check_choice("prompt", prompt, tuple(PROMPTS))
    place = model.folder
    if model.kind != "fused" and os.path.isdir(model.base or place):
        with Checkpoint(model.base or place):
            # raises an error that names what is wrong with the folder
            read_config(model.base or place)
    if model.kind in ("esft", "peft") and not Path(place, "tokenizer_config.json").is_file():
        place = model.base
    if model.kind == "fused":
        part = folders.locate(place, folders.read(place), {})[0]
        place = part.tokenizer or part.path
    if os.path.isdir(place) and not any(
        Path(place, name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")
    ):
        raise ValueError(
            f"Model {model.name!r} has no tokenizer in {place}. Save its tokenizer there"
        )
    tokenizer = ranks.load_tokenizer(place, f"tokenizer of {model.name!r}")
    tokenizer.chat_template = TEMPLATES.get(prompt, tokenizer.chat_template)
    if prompt == "chat" and not tokenizer.chat_template and model.kind != "fused":
        raise ValueError(
            f"Model {model.name!r} has no chat template. Put a chat_template.jinja into {place}, "
            "or pass --prompt plain"
        )
    return tokenizer


def load_lm(model: Model, tokenizer, dtype: str, batch_size: int):
    """Load a model as a language model of lm-eval, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model.kind == "fused":
        return FusedLM(
            folders.load(model.folder, dtype=None if dtype == "auto" else dtype, device=device),
            batch_size,
        )
    loaded = ranks.load_model(model.base or model.folder, dtype, name="model")
    if model.kind == "esft":
        adapters.apply(loaded, model.folder)
    if model.kind == "peft":
        loaded = load_lora(loaded, model.folder)
    with contextlib.suppress(ValueError):  # dense: there is nothing to speed up
        patch(loaded)
    hflm = require("lm_eval.models.huggingface", "eval").HFLM
    return hflm(
        loaded.to(device).eval(), backend="causal", tokenizer=tokenizer, batch_size=batch_size
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
        self._load = load
        self.is_rendered = False
        self.progress = lambda done, total: None
        # questions and answers, counted since they were set to 0
        self.truncated = 0
        self.cut = 0
        self.tokenizer_name = model.name
        self._lm, self._done, self._total, self._answers = None, 0, 0, _read(path)

    def apply_chat_template(
        self, chat: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat as text to continue, with the tokenizer's template, or in the format of
        `FusedLM`.
        """
        if self.model.kind == "fused":
            return FUSED + json.dumps(chat)
        if self.prompt == "plain":
            turns = [turn["content"] for turn in chat]
            # few-shot examples: answers start on a new line and are followed by a blank line
            if len(turns) > 1:
                turns = [
                    text.rstrip("\n") + ("\n" if i % 2 == 0 else "\n\n")
                    for i, text in enumerate(turns)
                ]
            return (self.tokenizer.bos_token or "") + "".join(turns)
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, **more)
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
        answers = []
        for answer in self._answered("loglikelihood", requests):
            answers.append(tuple(answer))
        return answers

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
        missing = []
        for one in requests:
            if _is_sampled(one.args) or _key(kind, one.args) not in self._answers:
                missing.append(one)
        self._done, self._total = len(requests) - len(missing), len(requests)
        self.progress(self._done, self._total)
        if missing:
            if self._lm is None:
                self._lm = self._load()
                self._lm.cache_hook = self
            self._lm.add_bos_token = False if self.is_rendered else None
            if kind == "generate_until":
                self._check_lengths(missing)
            fresh = dict(
                zip(
                    map(id, missing),
                    getattr(self._lm, kind)(missing, disable_tqdm=True),
                    strict=True,
                )
            )
        answers = []
        for one in requests:
            answers.append(
                fresh[id(one)]
                if missing and id(one) in fresh
                else self._answers[_key(kind, one.args)]
            )
        return answers

    def _check_lengths(self, requests: list) -> None:
        """Count the contexts that lm-eval truncates on the left; raises ValueError if no token of
        one would be left.
        """
        longest = max(one.args[1].get("max_gen_toks", 256) for one in requests)
        lm = self._lm
        if longest >= lm.max_length:
            raise ValueError(
                f"Answers of {longest} tokens do not fit into the {lm.max_length} positions of "
                f"model {self.model.name!r}. Lower --max-new-tokens"
            )
        self.truncated += sum(
            len(lm.tok_encode(one.args[0])) > lm.max_length - longest for one in requests
        )


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
        configs = []
        for model in fuser.specialists:
            configs.append(model.config.get_text_config())
        self.max_length = min(
            getattr(config, "max_position_embeddings", None) or 2048 for config in configs
        )

    def tok_encode(self, context: str) -> list[int]:
        """Return the longest of the specialists' prompts with the beginning of the answer."""
        prompt, answer = self._ids(context)
        return max(prompt, key=len) + answer

    def _ids(self, context: str, before: int = 0) -> tuple[list[list[int]], list[int]]:
        """Return the ids of a context for each specialist, and those of the answer's beginning."""
        encoder = self.fuser.encoder
        chat = [{"role": "user", "content": context}]
        if context.startswith(FUSED):
            chat = json.loads(context.removeprefix(FUSED))
        if chat[-1]["role"] == "assistant":
            begun = encoder.answer(chat.pop()["content"], end=False)
        else:
            begun = []
        if not context:  # as in lm-eval: BOS, or EOS
            return [[self._first()]] * len(self.fuser.names), []
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
        rows = []
        for row in batch:
            rows.append({"prompt_ids": row[1]} | ({"response_ids": row[2]} if has_answers else {}))
        device = self.fuser.gate.score.weight.device
        inputs = self.fuser.encoder.collate(rows)
        result = {}
        for k, v in inputs.items():
            result[k] = [t.to(device) for t in v] if isinstance(v, list) else v.to(device)
        return result

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
        """Return the generated answers, without their given beginnings, up to a stop sequence."""
        rows = []
        for i, one in enumerate(requests):
            rows.append((i, *self._ids(one.args[0]), json.dumps(one.args[1])))
        out = [""] * len(requests)
        tokenizer = self.fuser.encoder.tokenizer
        # answers whose given beginnings have the same length are generated in one batch
        for batch in self._batches(rows, lambda row: (len(row[2]), row[3])):
            settings = json.loads(batch[0][3])
            until = settings.pop("until", None) or []
            most = settings.pop("max_gen_toks", 256)
            until = [until] if isinstance(until, str) else until
            settings = {"do_sample": False} | settings
            if not settings["do_sample"]:
                settings.pop("temperature", None)
            inputs = self._inputs(batch, bool(batch[0][2]))
            begun = len(batch[0][2])
            inputs.pop("labels", None)
            more = {"stop_strings": until, "tokenizer": tokenizer} if until else {}
            ids = self.fuser.generate(**inputs, max_new_tokens=most, **settings, **more)
            for row, answer in zip(
                batch, tokenizer.batch_decode(ids[:, begun:], skip_special_tokens=True), strict=True
            ):
                out[row[0]] = _cut(answer, until)
                self.cache_hook.add_partial("generate_until", requests[row[0]].args, out[row[0]])
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
        for i, (text,) in enumerate(one.args for one in requests):
            # as lm-eval: with the tokenizer's own BOS
            ids = self.fuser.encoder.tokenizer.encode(text)
            windows = utils.get_rolling_token_windows(ids, self._first(), self.max_length, 1)
            for context, continuation in map(utils.make_disjoint_window, windows):
                rows.append((i, [context] * len(self.fuser.names), continuation, len(continuation)))
        sums = [0.0] * len(requests)
        for row, (score, _) in zip(
            rows, self._scores([(j, *row[1:]) for j, row in enumerate(rows)])
        ):
            sums[row[0]] += score
        for one, total in zip(requests, sums):
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
            for row, scores in zip(batch, logits, strict=True):
                ids = torch.tensor(row[2], device=scores.device)[len(row[2]) - row[3] :]
                scores = scores[len(row[2]) - row[3] : len(row[2])]
                total = scores.gather(1, ids[:, None]).sum().item()
                out[row[0]] = total, bool((scores.argmax(-1) == ids).all())
                if requests:
                    self.cache_hook.add_partial(kind, requests[row[0]].args, out[row[0]])
        return out


def _cut(text: str, until: Sequence[str]) -> str:
    """Return a text up to the first of the stop sequences."""
    return text[: min((text.find(one) for one in until if one in text), default=len(text))]
