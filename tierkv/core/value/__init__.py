"""What blocks are worth, and in which order they leave a tier."""
