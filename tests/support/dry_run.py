"""bench/gpu.sh without a GPU and without its processes, in seconds: python -m tests.support.dry_run
FOLDER [PART ...]

Every program is a stand-in that only records how it is called; time limits, shares and unused time
are those of a GPU machine, since the script's clock is a file. HANG contains words of commands that
never end, DIE words of commands that die once, each with an exit status: "bench_layer:99".

    python -m tests.support.dry_run /tmp/dry first        # the commands are in /tmp/dry/calls
    DIE=bench_layer:99 python -m tests.support.dry_run /tmp/dry first
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
COMMIT = "0123abc"

# GNU timeout with the clock in the file: a hanging command uses up all of its time at once
TIMEOUT = """#!{python} -SE
import os, signal, subprocess, sys, time

arguments, grace, number = sys.argv[1:], 0, signal.SIGTERM
while arguments[0].startswith("-"):
    option, value, *arguments = arguments
    if option == "-k":
        grace = int(float(value) * 1000)
    if option == "-s":
        number = getattr(signal, "SIG" + value)
clock = os.environ["CLOCK"]
deadline = int(open(clock).read()) + int(float(arguments[0]) * 1000)

def set_clock(ms):
    with open(clock, "w") as file:
        file.write("%012d\\n" % ms)

if os.path.exists(clock + ".waits"):
    os.unlink(clock + ".waits")
try:
    child = subprocess.Popen(arguments[1:], process_group=0)
except OSError as error:
    sys.exit(f"timeout: {{error}}")
while child.poll() is None:
    time.sleep(0.005)
    if os.path.exists(clock + ".waits"):
        set_clock(deadline)
        os.killpg(child.pid, number)
        time.sleep(0.05)
        if child.poll() is not None:
            sys.exit(124)
        set_clock(deadline + grace)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        sys.exit(137)
sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""
# writes its arguments, and a line to --results, like a run of pytest
PYTHON = """#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
echo "$*" >>"$CALLS"
case "$*" in *bench.device_check*) echo '{"name": "", "commit": "'$COMMIT'"}' >>"$3" ;; esac
hang() { trap '' INT; echo hang >"$CLOCK.waits"; sleep 100; }
for word in $HANG; do case "$*" in *"$word"*) hang ;; esac; done
results= previous=
for word; do
    case "$previous" in
    --results) results=$word ;;
    --out | --markdown) echo "{}" >"$word" ;;
    esac
    previous=$word
done
[ -z "$results" ] || echo '{"name": "call", "began": true}' >>"$results"
status=0
for rule in $DIE; do  # WORD:STATUS, once each
    mark=$CALLS.${rule//[^a-z0-9]/_}
    case "$*" in *"${rule%:*}"*) [ -e "$mark" ] || { : >"$mark"; status=${rule#*:}; } ;; esac
done
if [ $status = 101 ]; then exit 1; fi  # as pytest-timeout ends a process in the middle of a test
[ -z "$results" ] || [ $status -gt 1 ] || echo '{"name": "call", "outcome": "passed"}' >>"$results"
exit $status
"""
PROGRAM = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$CALLS"
hang() { trap '' INT; echo hang >"$CLOCK.waits"; sleep 100; }
for word in $HANG; do case "$0" in *"$word"*) hang ;; esac; done
previous=
for word; do
    [ "$previous" != --log-file ] || echo '"ID","Kernel Name"' >"$word"
    previous=$word
done
echo 9.0
"""


def environment(folder: Path) -> dict[str, str]:
    """Write the stand-ins and the clock to `folder`; return the environment of bench/gpu.sh."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    texts = {
        "timeout": TIMEOUT.format(python=sys.executable),
        "python": PYTHON,
        "ncu": PROGRAM,
        "compute-sanitizer": PROGRAM,
        "nvidia-smi": PROGRAM,
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    clock = folder / "clock"
    clock.write_text(f"{0:012d}\n")
    inherited = {}
    for name, value in os.environ.items():
        if not name.startswith(("PYTEST", "TRITON")):
            inherited[name] = value
    return {
        "HANG": "",
        "DIE": "",
        **inherited,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": str(programs / "python"),
        "OUT": str(folder / "out"),
        "COMMIT": COMMIT,
        "CLOCK": str(clock),
        "CALLS": str(folder / "calls"),
        "WORKERS": "2",
    }


def main() -> int:
    """Run parts of the script; return the exit status of the last one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "parts",
        nargs="*",
        default=["first", "second", "third"],
    )
    given = parser.parse_args()
    env = environment(given.folder.resolve())
    return subprocess.run(
        ["bash", str(SCRIPT), *given.parts],
        env=env,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
