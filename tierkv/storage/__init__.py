"""Bytes at rest: manifest, format, files, index, recovery."""
