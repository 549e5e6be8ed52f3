"""What travels between engines, operators and the node."""
