"""Every way from a folder to a folder, from folders of twice the memory that it may take, enforced
by the kernel.
"""

import json

import pytest

from tests.resources import conversions
from tests.support import limited

LIMIT = 20 << 20


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each way said, by its name, and what the process said besides."""
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
def test_a_folder_of_twice_the_memory_limit(way, told):
    ways, errors = told
    assert way in ways, errors[-3000:]
    assert "error" not in ways[way], ways[way]["error"]
    assert ways[way]["held"]
    assert ways[way]["size"] >= 2 * LIMIT
