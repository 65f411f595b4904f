"""Imported last by forking servers: excludes imported modules from garbage collection, which every
training runs.
"""

import gc

gc.collect()
gc.freeze()
