"""A slow network on one machine, and the benchmarks that run over it.

network.py     hosts in network namespaces, joined by links of a given rate
link.py        measures a link over plain TCP
benchmark.py   runs benchmarks in the lab
section.py     columns of the links, and sentences
"""
