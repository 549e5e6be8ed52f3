"""The command `tierkv`: a node, and what its operator wants to know of it.

Modules are named for their commands and imported only when theirs is called, so that `tierkv --help` is quick. What is
shown goes to stdout, how it is going and what went wrong to stderr; with --json stdout holds one JSON value.
"""
