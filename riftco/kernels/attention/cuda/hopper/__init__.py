"""Attention on Hopper in Gluon: see forward.py and supports.py. Imported where a GPU of capability 9 is."""
