"""Record the experts of a model's tokens and replay them later, for reinforcement learning and
debugging.

    with record_routing(model) as record:
        model(**batch)
    with replay_routing(model, record):
        model(**batch).loss.backward()

Only the choice of experts is replayed. The model's own router computes their weights, so gradients
reach it. With the same model weights and batch a replay is bit-identical, forward and backward;
other model weights, or router noise, change the routing weights but not the experts. Ids are [T, K]
in the layer's own order, one tensor per call of the layer.

Stock routers of transformers choose with torch.topk, whose result a replay overrides: over experts
by the recorded ids, over groups of experts by the groups that contain these ids. Routers that
choose in another way (PhiMoE's sparsemixer, ZAYA's skip expert) cannot be overridden, and raise
ValueError as soon as their experts differ from the record's.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    block_of,
    forget_compiled,
    ids_of,
    plain_name,
    routed_layers,
)
from moe_runtime.io.checkpoint import Checkpoint, write_tensors
from moe_runtime.io.files import atomic_file

FORMAT = "moe_runtime.routing.1"


@dataclass(eq=False)
class RoutingRecord:
    """Expert ids by layer and call.

    Attributes:
        ids: Path of a layer, without wrappers, to one tensor [T, K] int32 per call.
        num_experts: Path of a layer to its number of experts.
    """

    ids: dict[str, list[Tensor]] = field(default_factory=dict)
    num_experts: dict[str, int] = field(default_factory=dict)

    def save(self, path: StrPath) -> None:
        """Write a safetensors file, the ids as int32."""
        tensors = {}
        for layer, calls in self.ids.items():
            for call, ids in enumerate(calls):
                tensors[f"{layer}/{call}"] = ids.to("cpu", torch.int32).contiguous()
        sizes = {f"num_experts/{layer}": str(E) for layer, E in self.num_experts.items()}
        with atomic_file(path) as beside:
            write_tensors(beside, tensors, {"format": FORMAT} | sizes)

    @classmethod
    def load(cls, path: StrPath) -> "RoutingRecord":
        """Read a file of `save`; raises ValueError for other files and for ids out of range."""
        path = Path(path)
        with Checkpoint(path.parent, path.name) as file:
            record = cls()
            if file.metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} must be a file written by save, of format {FORMAT!r}, but its format "
                    f"is {file.metadata.get('format')!r}"
                )
            for key, value in file.metadata.items():
                if key.startswith("num_experts/"):
                    record.num_experts[key.removeprefix("num_experts/")] = int(value)
            calls = sorted((int(name.rpartition("/")[2]), name) for name in file.keys())
            for _, name in calls:
                layer = name.rpartition("/")[0]
                record.ids.setdefault(layer, []).append(file.get(name))
        record.check()
        return record

    @classmethod
    def from_engine(cls, model: nn.Module, ids: Sequence[Tensor], mask: Tensor) -> "RoutingRecord":
        """Make a record of one call of a model from the ids that an inference engine returned.

        Tokens that the engine has no ids for, padding among them, keep the router's own choice.

        Args:
            model: A stock MoE model.
            ids: Of each sequence, [tokens, layers, K] integers, layers in the model's order; of
                fewer tokens than the sequence has, if the last ones were not run; -1 where the
                engine knows nothing.
            mask: The batch's attention_mask, [B, S], padded on either side.

        Raises:
            ValueError: The ids do not fit the batch or the model, or its layers are ours.
        """
        layers = routed_layers(model)
        tokens = mask.sum(1).tolist()
        shapes = [tuple(one.shape) for one in ids]
        K = shapes[0][-1] if shapes else 0
        fit = len(shapes) == len(mask)
        for shape, count in zip(shapes, tokens, strict=False):
            fit = fit and shape[0] <= count and shape[1:] == (len(layers), K)
        if not fit or not all(layer.is_stock for layer in layers.values()):
            raise ValueError(
                f"ids must be tensors [tokens, {len(layers)}, K] for {len(mask)} sequences "
                f"of {tokens} tokens, of a stock model, but are {shapes}"
            )
        every = torch.full((*mask.shape, len(layers), K), -1, dtype=torch.int32)
        for row, one in enumerate(ids):
            places = mask[row].nonzero().flatten()[: len(one)].cpu()
            every[row, places] = one.to("cpu", torch.int32)
        record = cls({}, _sizes(layers))
        for number, name in enumerate(record.num_experts):
            record.ids[name] = [every[:, :, number].reshape(-1, K)]
        record.check()
        return record

    def check(self) -> None:
        """Raise ValueError unless all ids are [T, K] integers from -1 to the number of experts."""
        for layer, calls in self.ids.items():
            E = self.num_experts.get(layer, math.inf)
            for call, ids in enumerate(calls):
                low = high = 0
                if ids.numel():
                    low, high = (bound.item() for bound in ids.aminmax())
                is_integer = ids.dim() == 2 and not ids.is_floating_point()
                if not is_integer or low < -1 or high >= E:
                    raise ValueError(
                        f"ids of {layer}, call {call}, must be [T, K] integers from 0 to {E - 1}, "
                        f"but got {tuple(ids.shape)}, {ids.dtype}, {low} to {high}"
                    )


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts of each call of a model while the block runs.

    Recomputation under gradient checkpointing is not recorded. The ids stay on their device,
    without a sync.

    Args:
        model: A stock MoE model or one of ours, wrapped or not.

    Yields:
        The record, which grows with each call.
    """
    layers = routed_layers(model)
    forget_compiled()
    record = RoutingRecord({}, _sizes(layers))
    call = OpenCall(model)
    handles = [
        layer.watch(functools.partial(_note, call, record, plain_name(name)))
        for name, layer in layers.items()
    ]
    try:
        yield record
    finally:
        call.close()
        for handle in handles:
            handle.remove()


def _sizes(layers: dict[str, RoutedLayer]) -> dict[str, int]:
    return {plain_name(name): layer.num_experts for name, layer in layers.items()}


def _note(call: OpenCall, record: RoutingRecord, name: str, topk_idx: Tensor) -> None:
    if call.is_open:
        # a copy: the router's own tensor may be changed in place
        ids = topk_idx.detach().to(torch.int32, copy=True)
        record.ids.setdefault(name, []).append(ids)


@contextlib.contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[None]:
    """Route the tokens of a model's n-th call to the experts of the record's n-th call.

    Recomputation under gradient checkpointing gets the ids of the call that it repeats, so the
    backward pass must run inside the block too. Layers that are not in the record use their own
    routing.

    Args:
        model: A stock MoE model or one of ours, wrapped or not.
        record: Of `record_routing`, of a file, or made from ids of another engine.

    Raises:
        ValueError: If the record does not fit the model or the batch, has more calls than were
            made, or a router cannot be overridden. A layer's first call is compared with the record
            immediately, the others at the end, without a sync.
    """
    layers = routed_layers(model)
    _check_fits(model, layers, record)
    calls = OpenCall(model)
    replays = []
    for name, layer in layers.items():
        ids = record.ids.get(plain_name(name))
        if ids:
            kind = _StockReplay if layer.is_stock else _Replay
            replays.append(kind(layer, ids, calls))
            replays[-1].attach(block_of(model, layer))
    try:
        yield
        for replay in replays:
            replay.finish()
    finally:
        calls.close()
        for replay in replays:
            replay.close()


def _check_fits(model: nn.Module, layers: dict[str, RoutedLayer], record: RoutingRecord) -> None:
    if any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    ):
        raise ValueError("The model is compiled. Pass the original model, before torch.compile")
    sizes = _sizes(layers)
    if not any(record.ids.values()) or record.ids.keys() - sizes.keys():
        raise ValueError(
            f"The record must have layers of the model ({', '.join(sizes)}), but has "
            f"{', '.join(record.ids) or '(none)'}"
        )
    RoutingRecord(record.ids, sizes).check()


@dataclass(eq=False)
class _Replay:
    """Replays one of our routers, which accept ids as an argument."""

    layer: RoutedLayer
    ids: list[Tensor]
    calls: OpenCall
    # of the calls so far, to recognise repetitions
    inputs: list[Tensor] = field(default_factory=list)
    handles: list = field(default_factory=list)

    def attach(self, block: nn.Module) -> None:
        """Add the hooks to the layer, which is in `block`."""
        self.handles.append(
            self.layer.module.register_forward_pre_hook(self._give, with_kwargs=True)
        )

    def _give(self, module, args, kwargs):
        x = args[0] if args else kwargs["x"]
        return args, kwargs | {"topk_idx": self.next(x).to(x.device)}

    def next(self, x: Tensor) -> Tensor:
        """Return the ids [T, K] for the call with input `x` [..., H]."""
        # a few numbers of each token tell calls apart; a copy, since a block may change its input
        # in place
        x = x.detach().flatten(0, -2)[:, :4]
        if self.calls.is_open:
            number = len(self.inputs)
            self.inputs.append(x.clone())
        else:
            number = self._repetition(x)
        if number is None:
            problem = "was called outside of a call of the model"
        elif number >= len(self.ids) or len(self.ids[number]) != len(x):
            problem = f"has {len(x)} tokens in call {number}, but other ones in the record"
        else:
            return self.ids[number]
        raise ValueError(
            f"{self.layer.name} {problem}. Replay the recorded batches in their order, with "
            "gradient checkpointing that recomputes them"
        )

    def _repetition(self, x: Tensor) -> int | None:
        """Return the call that checkpointing repeats: the only one of this size, or the latest with
        this input.
        """
        calls = [i for i, known in enumerate(self.inputs) if known.shape == x.shape]
        if len(calls) > 1:
            calls = [i for i in calls if torch.equal(self.inputs[i], x)]
        return calls[-1] if calls else None

    def finish(self) -> None:
        """Raise ValueError if not all calls of the record were used."""
        if len(self.inputs) < len(self.ids):
            raise ValueError(
                f"{self.layer.name} was called {len(self.inputs)} times, but the record has "
                f"{len(self.ids)} calls. Replay all recorded batches, or use a record with fewer "
                "calls"
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class _StockReplay(_Replay):
    """Replays a stock layer by overriding torch.topk between the start of its block and its
    experts.
    """

    mode: "_TopK | None" = None
    is_wrong: Tensor | None = None
    steers = True

    def attach(self, block: nn.Module) -> None:
        """Add the hooks to the block and its experts."""
        self.handles = [
            block.register_forward_pre_hook(self._start, with_kwargs=True),
            self.layer.module.register_forward_pre_hook(self._compare, with_kwargs=True),
            block.register_forward_hook(self._stop, always_call=True),
        ]

    def _start(self, module, args, kwargs) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self._stop()
        self.mode = _TopK(self.next(x).to(x.device), self.layer.num_experts)
        self.mode.__enter__()

    def _stop(self, *_) -> None:
        mode = self.mode
        self.mode = None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _compare(self, module, args, kwargs) -> None:
        mode = self.mode
        ids = ids_of(args, kwargs)
        same = mode is not None and ids.shape == mode.ids.shape
        if mode is not None:
            mode.ends = True
        self.steers = self.steers and same and mode.answered
        is_wrong = torch.ones((), dtype=torch.bool)
        if same:
            is_wrong = ((ids != mode.ids) & (mode.ids >= 0)).any()
        if self.is_wrong is None or not same:
            self._refuse(is_wrong)
        self.is_wrong = is_wrong if self.is_wrong is None else self.is_wrong | is_wrong

    def finish(self) -> None:
        """Raise ValueError if a later call used other experts than the record, or if not all calls
        were used.
        """
        if self.is_wrong is not None:
            self._refuse(self.is_wrong)
        super().finish()

    def close(self) -> None:
        """Remove the hooks, and the override if Ctrl-C interrupted a block."""
        super().close()
        self._stop()

    def _refuse(self, is_wrong: Tensor) -> None:
        # checked by the result: a router that uses token ids, or is unchanged, may select the same
        # experts unaided
        if is_wrong:
            E = self.layer.num_experts
            K = self.ids[0].shape[1]
            why = (
                "its router, or a hook on it, changes the ids after torch.topk, which is not "
                "supported"
            )
            if not self.steers:
                why = (
                    f"its router does not select {K} of {E} with torch.topk, so this family cannot "
                    "be replayed"
                )
            raise ValueError(f"{self.layer.name} selected other experts than the record: {why}")


class _TopK(TorchFunctionMode):
    """Overrides torch.topk: over E experts with `ids` [T, K], over groups of experts with their
    groups.
    """

    def __init__(self, ids: Tensor, E: int):
        super().__init__()
        self.ids = ids
        self.E = E
        self.answered = self.ends = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.ends and func in (torch.topk, Tensor.topk):
            indices = self._indices(func, *args, **kwargs)
            if indices is not None:
                source = args[0] if args else kwargs["input"]
                return torch.return_types.topk((source.gather(-1, indices), indices))
        return func(*args, **kwargs)

    def _indices(self, func, input, k, dim=-1, largest=True, sorted=True, **_) -> Tensor | None:
        T, K = self.ids.shape
        wide = input.shape[-1]
        is_last = dim in (-1, input.dim() - 1)
        if not is_last or not largest or input.numel() != T * wide:
            return None
        forced = self.ids.long().view(*input.shape[:-1], K)
        if wide == self.E and k == K:
            self.answered = True
            own = func(input, k, dim=-1, sorted=sorted).indices
            return torch.where(forced < 0, own, forced)
        if not (1 < wide < self.E and self.E % wide == 0):
            return None
        # the best groups by score, but first those with forced experts
        groups = forced.clamp(min=0) // (self.E // wide)
        best = torch.where(forced < 0, input.detach().gather(-1, groups), torch.inf)
        scores = input.detach().scatter(-1, groups, best)
        return func(scores, k, dim=-1, sorted=sorted).indices
