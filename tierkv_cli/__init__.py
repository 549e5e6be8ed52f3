"""The command `tierkv`."""
