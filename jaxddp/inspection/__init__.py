"""Examines training steps on machines that are not here.

strategies.py     steps compiled for a target, read back and simulated: the work of ``python -m jaxddp inspect``
planned_step.py   the training step that a plan describes, compiled for its target
verification.py   a plan's formulas compared with that step: ``python -m jaxddp plan --verify``
stages.py         a training of one's own at every ZeRO stage, planned and compiled: ``python -m jaxddp plan --trainer``
walkthrough.py    what two ranks hold under ZeRO, phase by phase: ``python -m jaxddp.walkthrough``
"""
