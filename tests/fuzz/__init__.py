"""Differential fuzzing of the prologue pass: random programs through the real compiler.

``program`` says what a program is and prints it as Python, ``draw`` makes random ones,
``run`` compares eager, fused and unfused bit for bit. ``python -m tests.fuzz --minutes N`` runs
for long; ``test_fuzz`` is the fast profile; what was found became plain tests in
``test_findings``.
"""
