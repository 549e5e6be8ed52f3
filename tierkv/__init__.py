"""tierkv: the KV cache of LLM inference in tiers, outside the engine.

The public way in is `tierkv.client.connect`; operators use the command `tierkv`.
"""

__version__ = "0.1.0"
