"""Find, check and load the compiled libraries, and launch their kernels.

`cpp` is the library of csrc/cpu (backend "cpp"), `cuda` that of csrc/ (backend "cuda"). The
argument types are read from each library's C header, so that they are listed only once. Nothing is
loaded before the first use. The libraries are optional: the backends "triton" and "torch" do not
need them.
"""

import contextlib
import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from moe_runtime.io.files import untrusted_in_cache
from moe_runtime.native import build, selftest

_TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
# installed with this code, and trusted equally
WHEEL = Path(__file__).resolve().parents[1] / "_lib"
NO_OPENMP = "none: torch has loaded no OpenMP runtime"


Method = TypeVar("Method", bound=Callable)


def _constant_in_graphs(method: Method) -> Method:
    """Let torch.compile treat the result as a constant: loading a library would break the graph.

    Sets what torch.compiler.assume_constant_result sets, without the import of torch's compiler.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def read_header(text: str) -> dict[str, tuple[type | None, list[type | None]]]:
    """Return name -> (result type, argument types) of each MOERT_API function in a C header."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    declarations = re.findall(
        r"^\s*MOERT_API\s+([\w\s]+?[\s*]+)(moert_\w+)\s*\(([^)]*)\)\s*;", text, re.M
    )
    functions = {}
    for result, name, arguments in declarations:
        result_type = ctypes.c_char_p if "char" in result else _type(result)
        parts = [part.strip() for part in arguments.split(",")]
        functions[name] = (result_type, [_type(part) for part in parts if part not in ("", "void")])
    return functions


def _type(declaration: str) -> type | None:
    if "*" in declaration:
        return ctypes.c_void_p
    return _TYPES[declaration.replace("const ", "").split()[0]]


class Loaded(NamedTuple):
    """A loaded library."""

    handle: ctypes.CDLL
    path: Path
    info: dict  # of its build: hash of the sources, compiler or nvcc, instruction sets or archs
    openmp: str = NO_OPENMP  # the OpenMP runtime whose threads the CPU library uses

    @property
    def variant(self) -> str:
        """The instruction set that the CPU library uses."""
        return self.handle.moert_cpu_variant().decode()

    @property
    def emulated(self) -> bool:
        """Whether the CUDA kernels run on CPU tensors: the library of the test emulator lists no
        archs.
        """
        return not self.info.get("archs")


class Library:
    """One library of csrc/, searched for at first use, in the wheel and where the build command
    writes it.
    """

    kind: str  # of moe_runtime.native.build
    prefix: str  # of the functions, and the name of the header
    title: str

    def __init__(self) -> None:
        self.command = f"python -m moe_runtime.native.build {self.kind}"
        self._found: Loaded | str | None = None  # a string says why there is none

    def bind(self, path: Path, csrc: Path | None = None) -> Loaded:
        """Load the library at `path`, with the types of the header in `csrc`.

        Raises OSError if it does not load or was built from other sources.
        """
        csrc = csrc or build.csrc_dir(self.kind)
        text = (csrc / f"{self.prefix}.h").read_text()
        sources = build.source_hash(self.kind, csrc)
        handle = ctypes.CDLL(str(path))
        missing = ""
        for name, (result, arguments) in read_header(text).items():
            if not hasattr(handle, name):
                missing = missing or f" and has no {name}"
                continue
            getattr(handle, name).restype = result
            getattr(handle, name).argtypes = arguments
        info: dict[str, Any] = {}
        is_ours = False
        if not missing:
            info = json.loads(getattr(handle, f"{self.prefix}_build_info")())
            version = getattr(handle, f"{self.prefix}_abi_version")()
            is_ours = (
                f"#define {self.prefix.upper()}_ABI_VERSION {version}\n" in text
                and info.get("sources", sources) == sources  # the emulator's names none
            )
        if not is_ours:
            raise OSError(
                f"{path} was built from other sources than {csrc}{missing}. To rebuild it, run "
                f"{self.command}"
            )
        return Loaded(handle, Path(path), info)

    def places(self) -> list[Path]:
        """Return where to search: in the wheel, and in the cache if this user has one."""
        places = [WHEEL / build.NAMES[self.kind]]
        # no home, as in containers that run under a numeric user id
        with contextlib.suppress(OSError, RuntimeError):
            places.append(build.library_path(self.kind))
        return places

    def find(self) -> Loaded | str:
        """Return the library in use, or a string that says why there is none."""
        if self._found is None:
            self._found = self._search()
        return self._found

    def check(self, path: Path) -> None:
        """Raise OSError if the library at `path` must not be loaded into this process.

        Nothing of it may run if another user could have written it.
        """
        if path.parent != WHEEL and (reason := untrusted_in_cache(path)):
            raise OSError(reason)

    def _search(self) -> Loaded | str:
        header = build.csrc_dir(self.kind) / f"{self.prefix}.h"
        reasons = []
        try:
            if not header.is_file():
                return (
                    f"{header.parent} has no {header.name}, as a checkout or an installed wheel has"
                )
        except OSError as error:
            return str(error)
        for path in self.places():
            try:
                if path.is_file():  # raises if a parent folder is not readable
                    self.check(path)
                    return self.bind(path)
            except (OSError, RuntimeError, ValueError) as error:
                reasons.append(str(error))
        if reasons:
            return "; ".join(reasons)
        return f"the {self.title} library is not built. To build it, run {self.command}"

    def use(self, library: Loaded | None) -> None:
        """Use `library`, which `bind` has loaded, from now on; with None, search again."""
        self._found = library

    def library(self) -> Loaded:
        """Return the library in use. Raises a ValueError that says why there is none."""
        loaded = self.find()
        if isinstance(loaded, str):
            raise ValueError(loaded)
        return loaded

    def describe(self) -> str:
        """Describe the library in use, or say why there is none."""
        loaded = self.find()
        if isinstance(loaded, str):
            return f"none: {loaded}"
        return f"{loaded.path}: {self._describe(loaded)}"

    def _describe(self, loaded: Loaded) -> str:
        raise NotImplementedError


class CppLibrary(Library):
    """The library of csrc/cpu."""

    kind = "cpu"
    prefix = "moert_cpu"
    title = "CPU"
    DTYPES = {torch.float32: 0, torch.bfloat16: 2}  # as in moert_cpu.h
    ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "relu2": 5}
    IDX_KINDS = {torch.uint8: 1, torch.int8: -1, torch.int16: -2, torch.int32: -4, torch.int64: -8}

    def bind(self, path: Path, csrc: Path | None = None) -> Loaded:
        """Load the library as `Library.bind` does, and connect it to torch's OpenMP runtime.

        Two OpenMP runtimes in one process would compete for the cores.
        """
        library = super().bind(path, csrc)
        for runtime in _openmp_runtimes():
            if all(hasattr(runtime, name) for name in OPENMP):
                functions = [getattr(runtime, name) for name in OPENMP]
                addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
                library.handle.moert_cpu_use_openmp(*addresses)
                return library._replace(openmp=_file_at(addresses[0].value or 0))
        return library

    def check(self, path: Path) -> None:
        """Raise OSError also if the library fails its self-test on this processor.

        The test runs once, in a child process.
        """
        super().check(path)
        if problem := selftest.ensure(path):
            raise OSError(
                f"{path} is not used, because {problem}. To rebuild it, run {self.command}"
            )

    @_constant_in_graphs
    def why_not(self, device: torch.device) -> str | None:
        """Return why the library's kernels cannot run on `device`; None if they can."""
        if device.type != "cpu":
            return f"the tensor is on {device.type}, not on cpu"
        loaded = self.find()
        if isinstance(loaded, str):
            return loaded
        threads = torch.get_num_threads()
        if loaded.openmp == NO_OPENMP and threads > 1:
            return (
                f"the CPU library found no OpenMP runtime, but torch uses {threads} threads. "
                "Load libgomp, or call torch.set_num_threads(1)"
            )
        return None

    def _describe(self, loaded: Loaded) -> str:
        return f"{loaded.variant}, {loaded.info['compiler']}; OpenMP {loaded.openmp}"


def _openmp_runtimes() -> Iterator[ctypes.CDLL]:
    """Yield candidates for torch's OpenMP runtime, the most certain first."""
    torch_lib = Path(torch.__file__).parent / "lib"
    if os.environ.get("LD_PRELOAD"):
        yield ctypes.CDLL(None)  # preloaded libraries take precedence for torch too
    # a symbol looked up through torch resolves to what torch is linked with; other packages may
    # load another runtime
    paths = {Path(line[5]) for line in _maps() if len(line) > 5}
    runtimes = [path for path in paths if re.match(r"lib(g|i)?omp\d*[-.]", path.name)]
    runtimes.sort(key=lambda path: (not path.is_relative_to(torch_lib), path))
    for path in (torch_lib / "libtorch_cpu.so", *runtimes):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(str(path))


def _maps() -> list[list[str]]:
    """Return this process's mappings: the addresses, four columns, and the file if there is one."""
    maps = Path("/proc/self/maps")
    if maps.is_file():
        return [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    return []


def _file_at(address: int) -> str:
    """Return the file that is mapped at `address`."""
    for line in _maps():
        first, end = line[0].split("-")
        if int(first, 16) <= address < int(end, 16) and len(line) > 5:
            return line[5]
    return "of torch"


class CudaLibrary(Library):
    """The library of csrc/'s kernels."""

    kind = "cuda"
    prefix = "moert"
    title = "CUDA"
    DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in moert.h

    @_constant_in_graphs
    def why_not(self, device: torch.device) -> str | None:
        """Return why the kernels cannot run on `device`, CPU or CUDA GPU; None if they can."""
        loaded = self.find()
        emulated = isinstance(loaded, Loaded) and loaded.emulated
        if device.type == "cpu":
            return None if emulated else "the tensor is on the CPU, not on cuda"
        if isinstance(loaded, str):
            return loaded
        if emulated:
            return "the CUDA library in use is the emulator, which runs on the CPU"
        major, minor = torch.cuda.get_device_capability(device)
        if not covers(loaded.info["archs"], major, minor):
            archs = ", ".join(loaded.info["archs"])
            return f"{loaded.path} is for {archs}, not for sm_{major}{minor}. Run {self.command}"
        return None

    def _describe(self, loaded: Loaded) -> str:
        numbers = [ctypes.c_int(), ctypes.c_int(), ctypes.c_int()]  # driver, runtime, GPUs
        code = loaded.handle.moert_probe(*map(ctypes.byref, numbers))
        state = f"; {loaded.handle.moert_error_string(code).decode()}" if code else ""
        if loaded.emulated:
            return f"emulated{state}"
        return f"nvcc {loaded.info['nvcc']} for {', '.join(loaded.info['archs'])}{state}"

    def launch(self, name: str, tensor: torch.Tensor, *args: object) -> None:
        """Call the launcher `name` on the current stream of `tensor`'s device.

        `args` are all arguments except the last, the stream; tensors are passed as pointers. Raises
        RuntimeError on failure.
        """
        handle = self.library().handle
        function = getattr(handle, name)
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if tensor.is_cuda:
            with torch.cuda.device_of(tensor):
                code = function(*values, torch.cuda.current_stream().cuda_stream)
        else:
            code = function(*values, None)
        if code:
            message = handle.moert_error_string(code).decode()
            raise RuntimeError(f"{name} failed: {message} ({code})")


def covers(archs: list[str], major: int, minor: int) -> bool:
    """Return whether a GPU of this compute capability runs code for `archs`.

    It runs machine code of its major version, and PTX.
    """
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        version = int(digits[:-1]), int(digits[-1])
        if number != digits:  # sm_90a runs on 9.0 alone
            runs = version == (major, minor)
        else:
            runs = version <= (major, minor) and (kind == "compute" or version[0] == major)
        if runs:
            return True
    return False


cpp = CppLibrary()
cuda = CudaLibrary()
