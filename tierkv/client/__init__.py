"""How engines and operators talk to a node."""
