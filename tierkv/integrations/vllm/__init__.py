"""vLLM on the other side: its out-of-tree KV connector."""
