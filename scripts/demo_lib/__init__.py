"""The demo: what `scripts/demo` runs once there is an environment and a model."""
