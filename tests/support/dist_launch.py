"""Run a script in several processes that find each other through a file, so that no port is needed
and no hang lasts.

For each test worker, a server imports the shared libraries once and forks the processes, which are
otherwise independent. `forked` runs other code in the same way.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A process group with ranks that do not exist, for refusals before any communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    yield
    dist.destroy_process_group()


# what nearly every rank imports, and nothing that computes anything on import
IMPORTED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "accelerate",
    "moe_runtime.hf.training.trainer",
    "trl.trainer.sft_trainer",
    "moe_runtime.cli.app",
    "tests.support.frozen",
]


def launch(script: str | Path, ranks: int, folder: Path, *args: str) -> None:
    """Run main(*args) of `script` in `ranks` connected processes; on failure, raise an error with
    the first failing rank's output.
    """
    env = _environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    env |= {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    context = _forks()
    rendezvous = folder / "rendezvous"
    processes = []
    rendezvous.unlink(missing_ok=True)
    try:
        for rank in range(ranks):
            given = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = folder / f"rank{rank}.log"
            run = (str(script), list(args), given, os.getcwd(), log, log, str(rendezvous))
            processes.append(context.Process(target=_run, args=run))
            processes[-1].start()
        failed = _wait(processes, time.monotonic() + PATIENCE)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if failed is not None:
        log = (folder / f"rank{failed}.log").read_text()
        raise AssertionError(
            f"rank {failed} of {ranks} ended with {processes[failed].exitcode}:\n{log[-6000:]}"
        )


def forked(code: str, *args) -> subprocess.CompletedProcess:
    """Run `python -c CODE ARGS` in a fork of the server; return how it ended and its output."""
    with tempfile.TemporaryDirectory() as folder:
        process = _started(code, args, Path(folder))
        process.join(PATIENCE)
        is_late = process.is_alive()
        process.kill()
        process.join()
        texts = []
        for name in ("out", "errors"):
            text = ""
            if Path(folder, name).exists():
                text = Path(folder, name).read_text()
            texts.append(text)
    assert not is_late, f"{args} did not end within {PATIENCE} seconds:\n{texts[1][-6000:]}"
    return subprocess.CompletedProcess([*map(str, args)], process.exitcode, *texts)


def killed(code: str, *args, when: Callable[[], object]) -> None:
    """Run the same as `forked`, and kill it as soon as `when` finds something; fail if it ends
    earlier.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = _started(code, args, Path(folder))
        deadline = time.monotonic() + PATIENCE
        try:
            while not when():
                is_running = process.is_alive() and time.monotonic() < deadline
                assert is_running, Path(folder, "errors").read_text()[-6000:]
                time.sleep(0.01)
        finally:
            process.kill()
            process.join()
    assert process.exitcode == -signal.SIGKILL


def _started(code: str, args: tuple, folder: Path):
    """Start a process that runs the code as a script, with output to out and errors."""
    script = folder / "script.py"
    script.write_text(code)
    words = [*map(str, args)]
    run = (str(script), words, _environment(), str(ROOT), folder / "out", folder / "errors")
    process = _forks().Process(target=_run, args=run)
    process.start()
    return process


def _environment() -> dict[str, str]:
    """Return the environment of the server and its forks; some variables are read at import."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "0",
    }


def _forks():
    """Return the context of a server that has imported IMPORTED and forks the ranks, which saves
    seconds for each of them.
    """
    context = multiprocessing.get_context("forkserver")
    own = dict(os.environ)
    context.set_forkserver_preload(IMPORTED)
    try:
        os.environ.update(_environment())
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
    return context


def _run(
    script: str,
    args: list[str],
    env: dict[str, str],
    folder: str,
    out: Path,
    errors: Path,
    rendezvous: str | None = None,
) -> None:
    """Run as a separate process: environment, working directory, output, arguments; as a rank if
    there is a `rendezvous`.
    """
    for number, path in ((1, out), (2, errors)):
        os.dup2(
            os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND,
                0o644,
            ),
            number,
        )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [script, *args]
    if rendezvous is None:
        runpy.run_path(script, run_name="__main__")
        return
    main = runpy.run_path(script)["main"]
    start(rendezvous)
    main(*args)
    leave()


class Launches:
    """Runs `script` once per number of ranks, each in its own folder; after a failure it fails
    again without another run.
    """

    def __init__(self, script: str, tmp_path_factory):
        self.script = script
        self.folder_of = tmp_path_factory.mktemp
        self.done = {}

    def __call__(self, ranks: int, *args: str) -> Path:
        """Return the folder, which is the script's first argument after the rendezvous."""
        if ranks not in self.done:
            self.done[ranks] = folder = self.folder_of(f"ranks{ranks}")
            try:
                launch(self.script, ranks, folder, str(folder), *args)
            except AssertionError as error:
                self.done[ranks] = error
        if isinstance(self.done[ranks], AssertionError):
            raise self.done[ranks]
        return self.done[ranks]


def torchrun(*args: str, **options) -> None:
    """Run `args` in two processes with torchrun; on failure, show their output."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *args,
    ]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            # not kill, because the launcher's processes have their own sessions and would survive
            process.terminate()
            raise
    assert process.returncode == 0, out[-2000:] + errors[-6000:]


def start(rendezvous: str) -> None:
    """Connect to the other ranks of `launch`."""
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    seconds = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", timeout=seconds, world_size=ranks, rank=rank
    )


def leave() -> NoReturn:
    """End this rank when all ranks get here, without gloo's destructor.

    The destructor joins threads that may wait for the interpreter lock that it holds (PyTorch
    issues 56297, 190489), and then a rank never ends.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"left/{dist.get_rank()}", "")
    store.wait([f"left/{rank}" for rank in range(dist.get_world_size())])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait(processes: list, deadline: float) -> int | None:
    """Return the first rank that failed, one that a signal ended before others, or at the deadline
    the first that has not ended; None if all succeeded.
    """
    while True:
        codes = [process.exitcode for process in processes]
        bad = []
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                bad.append(rank)
        late = [rank for rank, code in enumerate(codes) if code is None]
        if bad:
            return min(bad, key=codes.__getitem__)
        if not late:
            return None
        if time.monotonic() > deadline:
            return late[0]
        time.sleep(0.1)


def times(out):
    """Return when each finished stage of a study was written."""
    values = {}
    for path in out.glob("*/result.json"):
        values[path.parent.name] = path.stat().st_mtime_ns
    return values
