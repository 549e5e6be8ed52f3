"""The eval behind a lossy codec: one model, its prefixes as they are and coded, and what it says next.

`tierkv eval` runs `python -m tierkv.evaluation` as a process of its own and speaks `messages` with it: the command line
needs neither torch nor transformers, and a model that takes all of the memory takes nobody along.
"""
