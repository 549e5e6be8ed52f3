"""A node under torture: engines whose every byte has an owner, faults and kills of every process, and a verdict.

`tierkv torture` runs it; see docs/torture.md. What is here drives nodes from outside, through the product's own seams,
and nothing of the product knows it.
"""
