"""What `make gpu` runs where a GPU is at hand: tests, exact weights over kills, and rows that share one GPU.

`make gpu CPU=1` rehearses the same programs over gloo, with small models. Standard library and torch only: the machine
may have no network and no `.venv`.
"""
