"""What the studies of all methods share: a stage is made by all processes or by none."""

import json

import pytest

from tests.support import dist_leading
from tests.support.dist_launch import launch


@pytest.mark.slow
def test_an_error_of_rank_0_alone_ends_all_processes(tmp_path):
    launch(dist_leading.__file__, 2, tmp_path, str(tmp_path), seconds=120)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["merge"].startswith("ValueError: Folder ") and "has no config.json" in first["merge"]
    assert first["full disk"] == "OSError: [Errno 28] No space left on device: 'model.safetensors'"
    assert first["other"] == "KeyError: 'lm_head'" and first["rows"] == first["other"]
    assert "Error: " in first["no place"] and "file" in first["no place"]
    assert first["mark"] == first["full disk"] and first["whole"] == "no error"
    assert first["there"] == [".locks", "stage"]
    for name, said in first.items():
        # an error that only one process has keeps its words everywhere, and its kind where the command line knows it
        assert said == second[name] or second[name].partition(": ")[2] == said.partition(": ")[2], name
