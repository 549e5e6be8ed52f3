"""scripts/gpu-check: tests that need a GPU, and copies beside those of torch."""
