"""Imported last by what forks: excludes what was imported from garbage collection, which every
training runs.
"""

import gc

gc.collect()
gc.freeze()
