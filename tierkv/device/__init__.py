"""Devices: memory that engines compute in, pools of block slots there, and the copies between pages, pools and host.

Only modules that a device loads import torch or cupy, and only when it is loaded: a node without a GPU needs neither.
"""
