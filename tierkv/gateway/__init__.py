"""The way in for tenants that must not be trusted: they never map the arena; payload travels in frames."""
