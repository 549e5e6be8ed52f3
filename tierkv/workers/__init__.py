"""Processes that move bytes for the node."""
