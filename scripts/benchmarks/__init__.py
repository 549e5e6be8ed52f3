"""Measurements, one file per question: each figure stands beside its limit, measured alternately in the same run."""
