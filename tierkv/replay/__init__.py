"""Replay: a trace of requests, run through the real core without a node, beside bounds that no policy can pass."""
