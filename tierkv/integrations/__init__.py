"""Engines on the other side."""
