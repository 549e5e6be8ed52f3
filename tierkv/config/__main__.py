"""`python -m tierkv.config` prints conf/tierkv.toml."""

from tierkv.config.words import example_file

print(example_file(), end="")
