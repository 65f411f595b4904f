"""Run a script of the docs like torchrun, except for its last line, which ends gloo:
`run_example.py FILE`.
"""

import runpy
import sys

import torch.distributed as dist

from tests.support.dist_launch import leave

if __name__ == "__main__":
    dist.destroy_process_group = leave
    runpy.run_path(sys.argv[1], run_name="__main__")
    raise SystemExit("the example did not end with dist.destroy_process_group()")
