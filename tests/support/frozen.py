"""Imported last by what forks: takes what was imported out of the garbage collector's sight, which every training searches."""

import gc

gc.collect()
gc.freeze()
