"""The worker of a device: a pool of block slots in its memory, and the copies between that and the arena."""
