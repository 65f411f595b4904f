"""How long a test waits for another process or thread before it counts as hung. Speed never decides
whether a test passes.
"""

PATIENCE = 3000  # seconds; less than pytest's own limit in pyproject.toml
