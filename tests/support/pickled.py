"""A pickle that runs code when it is loaded without restrictions."""

import os
from pathlib import Path


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
