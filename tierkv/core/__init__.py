"""The pure part: decides, never waits, does no I/O."""
