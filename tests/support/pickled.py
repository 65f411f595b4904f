"""A pickle that runs code where it is loaded without restrictions."""

import os
from pathlib import Path


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
