"""Every conversion between folders, from folders of twice the memory limit, which the kernel
enforces.
"""

import json

import pytest

from tests.resources import conversions
from tests.support import limited

LIMIT = 20 << 20


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of each conversion by name, and the error output of the process."""
    folder = tmp_path_factory.mktemp("conversions")
    code = "import sys; from tests.resources import conversions; conversions.main(*sys.argv[1:])"
    done = limited.run(code, folder, LIMIT)
    lines = []
    for line in done.stdout.splitlines():
        if line.startswith('{"way"'):
            lines.append(json.loads(line))
    return {line["way"]: line for line in lines}, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", conversions.WAYS)
def test_a_folder_of_twice_the_memory_limit(way, results):
    ways, errors = results
    assert way in ways, errors[-3000:]
    assert "error" not in ways[way], ways[way]["error"]
    assert ways[way]["held"]
    assert ways[way]["size"] >= 2 * LIMIT
