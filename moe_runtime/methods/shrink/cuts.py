"""What changes in a model and its folder when its layers have fewer experts.

Nothing is listed by family. The model that config.json describes is built twice on the meta device,
with E and with fewer experts: the tensors whose shapes differ are the experts' stacks, and those
with a row for each expert (the router's weight and bias, a correction bias). Their names in the
folder follow from transformers' own conversions.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from moe_runtime.hf.dropin.experts import stack_names
from moe_runtime.hf.dropin.layers import block_of, numbered_layers, plain_name
from moe_runtime.hf.dropin.quantize import METHOD
from moe_runtime.hf.models.families import EXPERT_FIELDS
from moe_runtime.hf.models.folders import read_config, skeleton, to_saved
from moe_runtime.hf.models.saved_rows import saved_tensors
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json

TOP_K_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
# formats of packed experts whose bytes belong to one expert each
SEPARABLE = ("mxfp4", "fp8", "fp8_block", "int8")
_EXPERT = re.compile(r"^(.*\bexperts\.)0(\..*)$")  # expert 0 in a saved name
_PARTS = ("", "_blocks", "_scales", "_scale_inv", ".SCB")  # of a packed stack


class Place(NamedTuple):
    """What a tensor of a folder holds of a layer."""

    layer: int
    expert: int | None = None  # all of one expert's
    prefix: str = ""  # of the name, before the expert's number
    suffix: str = ""  # and after it
    dim: int | None = None  # a dimension with an entry for each expert
    is_stack: bool = False  # whether these entries are the experts' weights


@dataclass
class Cuts:
    """The MoE layers of a model's folder, and which of its tensors depend on their experts.

    Attributes:
        path: The folder.
        config: Its config.
        model: The model on the meta device.
        num_experts: E, the same in all layers.
        top_k: Experts per token.
        groups: Groups of experts that routing is limited to, or 1.
        layers: By number: path of the experts module.
        blocks: By number: path of the module around it.
    """

    path: Path
    config: Any
    model: nn.Module
    num_experts: int
    top_k: int
    groups: int
    layers: dict[int, str]
    blocks: dict[int, str]
    _experts: dict[str, int]  # prefix of an expert's tensors -> layer
    _stacks: dict[str, int]  # name of a stack, or of a part of one -> layer
    _rows: dict[str, tuple[int, int]]  # name -> layer and dimension

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Cuts":
        """Find out what depends on the experts in a model's folder.

        Raises:
            ValueError: The model has no stock MoE layers, or its experts cannot be cut; the message
                says why.
        """
        config = read_config(checkpoint.path)
        model = skeleton(config)
        layers = {}
        for number, layer in sorted(numbered_layers(model).items()):
            if not layer.is_stock:
                raise ValueError(
                    f"{checkpoint.path} is an upcycled model of moe_runtime. Export it first: "
                    "moe-runtime xft export MODEL OUT --to mixtral"
                )
            layers[number] = layer
        numbers = {layer.num_experts for layer in layers.values()}
        if len(numbers) > 1:
            raise ValueError(
                f"The layers of {checkpoint.path} have {sorted(numbers)} experts, but must have "
                "the same number"
            )
        text = config.get_text_config()
        paths = {module: name for name, module in model.named_modules()}
        cuts = cls(
            path=Path(checkpoint.path),
            config=config,
            model=model,
            num_experts=numbers.pop(),
            top_k=_first(text, TOP_K_FIELDS, 1),
            groups=_first(text, ("n_group",), 1),
            layers={number: plain_name(layer.name) for number, layer in layers.items()},
            blocks={number: paths[block_of(model, layer)] for number, layer in layers.items()},
            _experts={},
            _stacks={},
            _rows={},
        )
        for number, layer in layers.items():
            cuts._add_stacks(number, layer.module)
        cuts._add_rows(checkpoint)
        return cuts

    def _add_stacks(self, number: int, module: nn.Module) -> None:
        """Note the names that a layer's stacks have in the folder, or in folders of its kind."""
        for stack in stack_names(module):
            name = f"{self.layers[number]}.{stack}"
            saved = to_saved(self.model, {name: getattr(module, stack)[:1]})
            for key in (name, *saved):
                match = _EXPERT.match(key)
                if match is not None:
                    self._experts[match[1]] = number
                else:
                    self._stacks[key] = number

    def _add_rows(self, checkpoint: Checkpoint) -> None:
        """Note the other tensors with an entry for each expert."""
        fewer = self.num_experts // 2
        smaller = skeleton(self.configured(fewer))
        parameters = self.model.state_dict()
        sizes = {name: tensor.shape for name, tensor in smaller.state_dict().items()}
        for name, tensor in parameters.items():
            if name.endswith("tid2eid"):
                raise ValueError(
                    f"{name} of {self.path} assigns experts to token ids, which cannot be cut"
                )
            if sizes.get(name) == tensor.shape or self._is_stack(name):
                continue
            dims = [i for i, n in enumerate(tensor.shape) if n == self.num_experts]
            owners = [n for n, block in self.blocks.items() if name.startswith(f"{block}.")]
            if len(dims) != 1 or len(owners) != 1:
                raise ValueError(
                    f"{name} {list(tensor.shape)} of {self.path} changes with the number of "
                    "experts in a way that is not known, so they cannot be cut"
                )
            for key in saved_tensors(self.model, {name: tensor}, checkpoint):
                self._rows[key] = (owners[0], dims[0])

    def _is_stack(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.layers.values()

    def place(self, key: str) -> Place | None:
        """Return what a tensor of the folder holds of a layer; None if it depends on no expert."""
        if key in self._rows:
            layer, dim = self._rows[key]
            return Place(layer, dim=dim)
        prefix, _, rest = key.partition("experts.")
        digits, dot, suffix = rest.partition(".")
        prefix = f"{prefix}experts."
        if prefix in self._experts and digits.isdecimal():
            return Place(self._experts[prefix], int(digits), prefix, dot + suffix)
        for part in _PARTS:
            stack = key.removesuffix(part)
            if key.endswith(part) and stack in self._stacks:
                return Place(self._stacks[stack], dim=0, is_stack=True)
        return None

    def configured(self, num_experts: int, top_k: int | None = None) -> Any:
        """Return the config with fewer experts, and another number of experts per token if given.

        Raises:
            ValueError: No field of the config sets the number of experts.
        """
        config = copy.deepcopy(self.config)
        for _, part, field in self._fields(config):
            setattr(part, field, num_experts)
        if top_k is not None:
            text = config.get_text_config()
            for field in TOP_K_FIELDS:
                if getattr(text, field, None) == self.top_k:
                    setattr(text, field, top_k)
        found = {layer.num_experts for layer in numbered_layers(skeleton(config)).values()}
        if found != {num_experts}:
            raise ValueError(
                f"config.json of {self.path} has no field that sets the number of experts "
                f"({self.num_experts}), so they cannot be cut"
            )
        return config

    def _fields(self, config: Any) -> Iterator[tuple[tuple[str, ...], Any, str]]:
        """Yield the path, the part and the field of all numbers of experts in a config."""
        parts: dict[tuple[str, ...], Any] = {(): config}
        for name in config.sub_configs or {}:
            part = getattr(config, name, None)
            if part is not None:
                parts[name,] = part
        for path, part in parts.items():
            names = {part.attribute_map.get(field, field) for field in EXPERT_FIELDS}
            for field in sorted(names):
                if getattr(part, field, None) == self.num_experts:
                    yield path, part, field

    def changed_json(self, num_experts: int, top_k: int | None = None) -> dict[str, Any]:
        """Return config.json of the folder with fewer experts, otherwise as it is."""
        values = read_json(self.path / "config.json")
        changed = self.configured(num_experts, top_k)
        for path, _, field in self._fields(self.config):
            _at(values, path)[field] = num_experts
        if top_k is not None:
            text = changed.get_text_config()
            path = self.path_of_text()
            for field in TOP_K_FIELDS:
                field = text.attribute_map.get(field, field)
                if getattr(text, field, None) == top_k:
                    _at(values, path)[field] = top_k
        return values

    def path_of_text(self) -> tuple[str, ...]:
        """Return where in config.json the language model's fields are."""
        text = self.config.get_text_config()
        if text is self.config:
            return ()
        names = [n for n in self.config.sub_configs if getattr(self.config, n, None) is text]
        return tuple(names[:1])

    def check_keep(self, keep: int, top_k: int | None = None) -> None:
        """Raise ValueError unless layers can have `keep` experts."""
        chosen = self.top_k if top_k is None else top_k
        E = self.num_experts
        if not 1 <= keep < E:
            raise ValueError(f"keep must be from 1 to {E - 1}, as layers have {E}, but got {keep}")
        if not 1 <= chosen <= keep:
            raise ValueError(
                f"Each token goes to {chosen} experts, but {keep} would be left. Keep at least "
                f"{chosen}, or pass top_k, at most {keep}"
            )
        if self.groups == 1:
            return
        limit = _first(self.config.get_text_config(), ("topk_group",), self.groups)
        each = keep // self.groups
        if keep % self.groups or each < min(2, E // self.groups) or limit * each < chosen:
            raise ValueError(
                f"The router of this family chooses {chosen} experts in {limit} of {self.groups} "
                f"groups, so keep must be a multiple of {self.groups}, with at least two experts "
                f"in a group and {chosen} in {limit} groups, but got {keep}"
            )

    def check_separable(self, floats: bool) -> None:
        """Raise ValueError if the experts' bytes cannot be taken apart; with `floats`, unless they
        are not quantized.
        """
        quantization = getattr(self.config, "quantization_config", None) or {}
        if not isinstance(quantization, Mapping):
            quantization = quantization.to_dict()
        method = quantization.get("quant_method")
        if method == METHOD:
            method = quantization.get("format")
        if method is None or (method in SEPARABLE and not floats):
            return
        why = f"only {', '.join(SEPARABLE)} can be cut without unpacking them"
        if floats:
            why = "weights of 16 or 32 bits are required here"
        raise ValueError(
            f"The experts in {self.path} are quantized ({method}), but {why}. Shrink the model in "
            "16 bits, and quantize the result"
        )


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first of these fields that is a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default


def _at(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of a JSON object at a path, which is created if it is missing."""
    for name in path:
        values = values.setdefault(name, {})
    return values
