"""Memory of a training step on each device.

benchmark.py        every strategy, by moment
variants.py         steps compiled and read; on GPUs also run under the allocator
torch_peak.py       torchref's steps under CUDA's allocator
report_figures.py   the assignment report's figures
section.py          columns and figures
"""
