"""The contract of every op as one table of cases: what an op must compute, on which inputs.

draw      random inputs: sizes, routings, layouts in memory, options
oracle    the equations in float64, which call none of the checked code
measure   run a case, and how far a result may be from its equation
cases     CASES: the op of each case, and what makes it from a draw

`moe-runtime doctor --check`, the test suite, the stress run and the GPU all use this table.
"""
