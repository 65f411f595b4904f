"""bench/gpu.sh without a GPU, its whole control flow in little time: python -m
tests.support.dry_run FOLDER [PART ...]

Every step runs its real processes on `tests.support.fake_gpu`; only timeout, nvidia-smi, ncu and
compute-sanitizer are stand-ins. The clock is a file, so that limits, shares and leftovers are those
of a GPU machine, whatever this one is.

    python -m tests.support.dry_run /tmp/dry first        # results in /tmp/dry/out
    python -m tests.support.dry_run /tmp/dry first --faults "bench_forward[OLMoE-16384=lost"
    --missing "httpx datasets"
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
COMMIT = "0123abc"

# GNU's, by the clock of the file: who waits there is waited for no longer, and the deadline comes
# at once
TIMEOUT = """#!{python} -SE
import os, signal, subprocess, sys, time

arguments, grace, number = sys.argv[1:], 0, signal.SIGTERM
while arguments[0].startswith("-"):
    option, value, *arguments = arguments
    if option == "-k":
        grace = int(float(value) * 1000)
    if option == "-s":
        number = getattr(signal, "SIG" + value)
clock, left = os.environ["CLOCK"], int(float(arguments[0]) * 1000)

def read(): return int(open(clock).read())
def set(ms): os.pwrite(os.open(clock, os.O_WRONLY), b"%012d\\n" % ms, 0)

deadline = read() + left
with open(clock + ".deadline", "w") as file:
    file.write(str(deadline))
if os.path.exists(clock + ".waits"):
    os.unlink(clock + ".waits")
try:
    child = subprocess.Popen(arguments[1:], process_group=0)
except OSError as error:
    sys.exit(f"timeout: {{error}}")
late = False
while child.poll() is None and not late:
    time.sleep(0.005)
    late = os.path.exists(clock + ".waits")
if late:
    set(deadline)
    os.killpg(child.pid, number)
    began = time.monotonic()
    while open(clock + ".waits").read() == "late" and child.poll() is None:
        if time.monotonic() - began >= 20:
            break
        time.sleep(0.005)
    if child.poll() is None:
        set(deadline + grace)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        sys.exit(137)
    sys.exit(124)
sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""
# the program behind their options really runs
PROGRAM = """#!/usr/bin/env bash
case "${0##*/}" in nvidia-smi) echo 9.0; exit ;; esac
echo "${0##*/} $*"
while [ $# -gt 0 ] && [ "$1" != "$PYTHON" ]; do
    [ "$1" != --log-file ] || echo '"ID","Kernel Name"' >"$2"
    shift
done
exec "$@"
"""
SITE = "from tests.support import fake_gpu\n\nfake_gpu.install()\n"


def environment(folder: Path, python: str, faults: str = "", missing: str = "") -> dict[str, str]:
    """Write the stand-ins and the clock into `folder`; return the environment of bench/gpu.sh, with
    OUT in there too.
    """
    programs = folder / "bin"
    site = folder / "site"
    clock = folder / "clock"
    for made in (programs, site):
        made.mkdir(parents=True, exist_ok=True)
    for name in ("timeout", "nvidia-smi", "ncu", "compute-sanitizer"):
        (programs / name).write_text(
            TIMEOUT.format(python=sys.executable) if name == "timeout" else PROGRAM
        )
        (programs / name).chmod(0o755)
    (site / "sitecustomize.py").write_text(SITE)
    clock.write_text(f"{0:012d}\n")
    (folder / "clock.deadline").write_text("999999999")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "TRITON"))
    }
    return kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": python,
        "OUT": str(folder / "out"),
        "COMMIT": COMMIT,
        "CLOCK": str(clock),
        "FAULTS": faults,
        "MISSING": missing,
        "PYTHONPATH": str(site),
        "WORKERS": "2",
        "PYTEST_PLUGINS": "tests.support.fake_gpu",
    }


def run(parts: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run parts of the script; return its exit status and what it printed."""
    command = f'export SCRIPT_PID=$$; exec bash {SCRIPT} "$@"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", *parts],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout


def elapsed(env: dict[str, str]) -> float:
    """Return the seconds that the clock has gone."""
    return int(Path(env["CLOCK"]).read_text()) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", default=["first", "second", "third"])
    parser.add_argument("--python", default=sys.executable, help="of another environment")
    parser.add_argument(
        "--faults", default="", help="WORD=KIND ..., as tests/support/fake_gpu.py says"
    )
    parser.add_argument("--missing", default="", help="packages that are hidden")
    given = parser.parse_args()
    for part in given.parts:
        env = environment(given.folder.resolve(), given.python, given.faults, given.missing)
        status, said = run([part], env)
        print(
            said, f"{part}: exit status {status} after {elapsed(env):.0f} s of the clock", sep="\n"
        )
    print(
        "\n".join(
            f"{path.name}: {path.stat().st_size:,} bytes"
            for path in sorted((given.folder / "out").iterdir())
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
