"""The file of measured launch configs, which `kernels.tiles` reads: what `tuning` has done, and what it must not try again."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_runtime import files
from moe_runtime.kernels import tiles
from moe_runtime.kernels.tiles import Tile


class Unwritten(OSError):
    """What is measured cannot be kept: no fault of the config that was to run."""


class Results:
    """The file of measured configs, for one GPU: what is done, what must not be tried again."""

    def __init__(self, path: Path, device: str):
        self.path, self.device = path, device
        self.marker = path.with_name(f".{path.name}.trying")
        tiles.read_tuned.__wrapped__(path)  # raises ValueError if it is not a file of ours
        if self.marker.exists():  # the process that wrote it died without a word
            with contextlib.suppress(ValueError):
                died = json.loads(self.marker.read_text())
                self.save_broken(died["key"], died["tile"], "the process died")
            self.marker.unlink()

    def read(self) -> dict:
        """Return the GPU's part of the file."""
        return self._load()["devices"].get(self.device, {"tiles": {}})

    def done(self) -> set[str]:
        """Return the keys of the problems that are measured."""
        return set(self.read()["tiles"])

    def broken(self, key: str) -> list[Tile | None]:
        """Return the configs that ended a process when they ran on this problem; None stands for compiling many at once."""
        entries = self.read().get("broken", {}).get(key, ())
        return [entry["tile"] and Tile(**entry["tile"]) for entry in entries]

    def save(self, key: str, entry: dict) -> None:
        """Write the entry of a problem that `tuning.measure` made."""
        self._change(lambda device: device["tiles"].update({key: entry}))

    def save_broken(self, key: str, tile: dict | None, note: str) -> None:
        """Note a config that ended a process, None for compiling many at once."""
        entry = {"tile": tile, "note": note}
        self._change(lambda device: device.setdefault("broken", {}).setdefault(key, []).append(entry))

    def forget_broken(self) -> None:
        """Forget the notes of `save_broken`, so that those configs are tried once more."""
        if "broken" in self.read():
            self._change(lambda device: device.pop("broken", None))

    @contextlib.contextmanager
    def trying(self, key: str, tile: Tile | None) -> Iterator[None]:
        """Leave a mark that stays if the process dies in this block, and only then."""
        try:
            self._mark(key, tile)
            yield
        finally:
            if self.marker.exists():
                self.marker.unlink()

    def _mark(self, key: str, tile: Tile | None) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.marker.write_text(json.dumps({"key": key, "tile": tile and tile._asdict()}))
        except OSError as error:
            raise Unwritten(error.errno, error.strerror, str(self.path)) from error

    def _load(self) -> dict:
        return files.read_json(self.path) if self.path.exists() else {"format": 1, "devices": {}}

    def _change(self, change: Callable[[dict], object]) -> None:
        # read anew: another process may measure another layer into the same file
        values = self._load()
        change(values["devices"].setdefault(self.device, {"tiles": {}}))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.atomic_write_json(self.path, values)
