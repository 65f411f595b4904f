"""Makes transformers' auto classes know our model classes, whichever package is imported first.

Ours can only be registered once theirs are there, and importing those takes seconds. So while they are not loaded,
a finder on `sys.meta_path` watches the modules of transformers and of this package being executed. It registers, and
goes, when the outermost of them is done and the auto classes are among what it brought. Not earlier: transformers loads
its auto classes halfway through a model file (`from transformers import LlamaForCausalLM`), and a class of ours that
builds on that file could not import it then.
"""

import sys
import threading
from functools import partial

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
WATCHED = ("transformers", "moe_runtime")


def register_when_imported() -> None:
    """Register our classes with transformers' auto classes: now if those are loaded, else as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    from moe_runtime.hf.modeling import register_auto_classes

    register_auto_classes()


class _Watch(threading.local):
    """Finds what the finders behind it find, and counts how deep inside watched modules this thread is."""

    depth = 0

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in WATCHED:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, exec_module, module) -> None:
        self.depth += 1
        try:
            exec_module(module)
        finally:
            self.depth -= 1
        if self.depth == 0 and AUTO_CLASSES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()
