"""Benchmark of the Triton kernels on this machine: ``python -m fusion.backends.triton.bench``.

``prologue.run`` returns rows (microseconds, ratio to a copy of the same bytes, ratio to plain
Inductor, correctness); ``fusion bench`` prints them.
"""
