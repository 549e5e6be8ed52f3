"""`python -m tierkv.metrics` prints docs/metrics.md."""

from tierkv.metrics.table import page

print(page(), end="")
