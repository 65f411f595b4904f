"""`moe-runtime doctor` on a broken setup: it never crashes, names each fix in one line, and exits
with 1.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_runtime.cli.app import app as main_app
from moe_runtime.native.library import cpp, cuda
from moe_runtime.tools import doctor
from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def sound(monkeypatch, tmp_path):
    """A setup without what the test machine may have: variables, a GPU, a folder of measured
    configs.

    PyTorch's backend is requested, since otherwise a CPU without the library gets a hint.
    """
    for name in (*doctor.VARIABLES, "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from moe_runtime.kernels import tiles

    tiles.read_tuned.cache_clear()
    yield
    tiles.read_tuned.cache_clear()


@pytest.fixture
def versions(monkeypatch):
    """Replace the versions that packages report; an exception is raised."""
    real = importlib.metadata.version

    def use(**changed):
        def version(name):
            value = changed.get(name.replace("-", "_"), real)
            if value is real:
                return real(name)
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(importlib.metadata, "version", version)

    return use


@pytest.fixture
def gpu(tmp_path):
    """An NVIDIA GPU that the kernel knows, by the version of its driver."""

    def plug(driver: str):
        (tmp_path / "nvidia0").touch()
        text = (
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed Sep 3\n"
            "GCC version: 12\n"
        )
        (tmp_path / "version").write_text(text)

    return plug


def problems() -> dict[str, str]:
    return doctor.report()["problems"]


def test_nothing_is_wrong_with_a_sound_setup():
    assert problems() == {}
    out = CliRunner().invoke(main_app, ["doctor"])
    assert out.exit_code == 0
    assert out.output.rstrip().endswith("problems\n  none")


def test_a_problem_is_a_line_and_the_exit_code(versions):
    versions(transformers="4.57.0")
    out = CliRunner().invoke(main_app, ["doctor"])
    assert out.exit_code == 1
    line = out.output.split("problems\n")[1]
    assert line.strip().endswith(
        "transformers is 4.57.0, but >=5.16,<6 is required. Run pip install -U "
        "'transformers>=5.16,<6'"
    )
    assert len(line.splitlines()) == 1


GONE = importlib.metadata.PackageNotFoundError("gone")


@pytest.mark.parametrize(
    "name, version, says",
    [
        (
            "torch",
            "2.9.1",
            "torch is 2.9.1, but >=2.11 is required. Run pip install -U 'torch>=2.11'",
        ),
        ("triton", GONE, "triton is missing. Run pip install 'triton>=3.6,<4'"),
        ("numpy", None, "numpy is unreadable (no version). Run pip install --force-reinstall"),
    ],
)
def test_packages(versions, name, version, says):
    versions(**{name: version})
    assert list(problems()) == [name]
    assert problems()[name].startswith(says)


def test_a_prerelease_is_new_enough(versions):
    versions(torch="2.12.0.dev20261001")
    assert problems() == {}


def test_a_cache_that_others_can_write(tmp_path):
    folder = tmp_path / "cache" / "moe_runtime"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert list(problems()) == ["cache"]


def test_a_driver_and_a_torch_without_cuda(gpu, tmp_path, monkeypatch):
    gpu("580.65.06")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(problems()) == ["devices"]
    assert "is a build without CUDA, but there is an NVIDIA GPU" in problems()["devices"]
    # SLURM sets this for a job without GPUs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert problems() == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").unlink()  # in a container, the host may have a driver without a GPU
    assert problems() == {}


def test_an_old_driver(gpu, monkeypatch):
    gpu("535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    ((name, text),) = problems().items()
    assert name == "driver"
    assert "is 535, but torch is built with CUDA 13.0, which requires 580 or newer" in text
    gpu("580.65.06")  # new enough
    assert list(problems()) == ["devices"]
    gpu("535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # it is new enough for this one
    assert list(problems()) == ["devices"]
    assert "nvidia-smi" in problems()["devices"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # set on purpose
    report = doctor.report()
    assert report["problems"] == {}
    assert report["devices"]["cuda"] == "none: CUDA_VISIBLE_DEVICES is ''"


def test_torch_and_numpy_that_do_not_fit(monkeypatch):
    def broken(*_):
        raise RuntimeError("no platform\nmore")

    monkeypatch.setattr(torch.Tensor, "numpy", broken)
    ((name, text),) = problems().items()
    assert name == "numpy"
    assert text == "torch cannot use numpy (no platform). Run pip install -U numpy"


@pytest.mark.parametrize(
    "requested, says", [("fast", "backend must be one of"), ("triton", "TRITON_INTERPRET=1")]
)
def test_a_backend_that_cannot_run(monkeypatch, requested, says):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", requested)
    assert list(problems()) == ["MOE_RUNTIME_BACKEND"]
    assert says in problems()["MOE_RUNTIME_BACKEND"]
    assert problems()["MOE_RUNTIME_BACKEND"].endswith(
        "Unset MOE_RUNTIME_BACKEND or set another one"
    )


def test_a_file_without_measured_configs(tmp_path):
    path = tmp_path / "cache" / "moe_runtime" / "tiles.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = problems()
    assert list(found) == ["launch configs"]
    assert str(path) in found["launch configs"]
    assert found["launch configs"].endswith("Remove it and rerun moe-runtime tune")


@pytest.mark.parametrize("library, row", [(cuda, "cuda library"), (cpp, "cpu library")])
def test_a_library_of_other_sources(monkeypatch, library, row):
    text = "lib.so was built from other sources than csrc. To rebuild it: python -m moe_runtime"
    monkeypatch.setattr(library, "_found", text)
    assert problems() == {row: text}
    monkeypatch.setattr(library, "_found", "the library is not built. To build it, run how to")
    monkeypatch.delenv("MOE_RUNTIME_BACKEND")
    # without a GPU the experts would run in the CPU library
    report = doctor.report()
    assert report["problems"] == {}
    slow = report["hints"].get(row)
    if library is cpp and not torch.cuda.is_available():
        assert slow.startswith("experts run in PyTorch, which is slower: the library is not built")
    else:
        assert slow is None


def test_a_missing_extra_is_a_hint(versions):
    versions(peft=GONE, scipy=GONE)
    report = doctor.report()
    assert report["problems"] == {}
    assert list(report["hints"]) == ["train"]
    assert report["hints"]["train"].startswith("peft, scipy missing, needed by train, stats, ")
    short = doctor.summary(report)
    assert short["hints"] == report["hints"]
    assert short["versions"]["torch"] == report["packages"]["torch"]
    assert short["backends"] == {"torch": ", ".join(report["backends"])}


def test_without_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('bad ELF')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [
        sys.executable,
        "-m",
        "moe_runtime",
        "doctor",
    ]
    done = captured(command, env=env, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    line = done.stdout.split("problems\n")[1].splitlines()[0]
    assert "torch cannot be imported: " in line
    assert "pip install --force-reinstall 'torch>=2.11'" in line


@pytest.mark.parametrize(
    "triton, capability, omitted",
    [
        ("3.6.0", (10, 0), "fence"),
        ("3.9.0", (10, 0), "wait"),
        ("3.7.1", (10, 0), None),
        ("3.6.0", (9, 0), None),
    ],
)
def test_what_triton_compiles_wrongly(versions, monkeypatch, triton, capability, omitted):
    versions(triton=triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    text = dict(doctor._problems(doctor.report(), torch, "")).get("triton", "")
    assert (f"triton is {triton}, which omits a {omitted} " in text) == (omitted is not None)
