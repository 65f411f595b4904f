"""How long a test waits for another process or thread before it counts as hung. No test passes or
fails by how fast it is.
"""

PATIENCE = 3000  # seconds; less than pytest's own limit in pyproject.toml
