"""What tierkv's vLLM connector is measured beside, made to run on a CPU: vLLM's own offloading, and LMCache.

What vLLM itself loads (tiering_on_cpu, timed) imports nothing of the benchmarks.
"""
