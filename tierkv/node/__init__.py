"""The service: supervisor, front, and what they share."""
