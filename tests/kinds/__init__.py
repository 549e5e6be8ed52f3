"""Kinds of faults that caches met in the field: what rules each out, and which mutations its tests catch."""
