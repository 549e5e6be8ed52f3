"""The engine's side of a node's pool on a GPU: how it is mapped, and how blocks are copied between it and an engine's
pages. What needs the vendor's libraries is imported when a pool is mapped, and not before."""
