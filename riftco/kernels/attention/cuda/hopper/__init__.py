"""Attention on Hopper in Gluon: see forward.py and backward_walk.py. Imported where a GPU of capability 9 is."""
