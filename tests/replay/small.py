"""Traces of a few letters: each prompt a word, each letter a block."""

from __future__ import annotations

from collections import OrderedDict

from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb

BLOCK_TOKENS = 4
BLOCK_BYTES = 4096


def trace_of(*prompts: str, verb: Verb = Verb.SERVE, gap: float = 1.0) -> Trace:
    """One prompt every `gap` seconds. "abx" shares two blocks with "aby", and none with "cab"."""
    return trace_of_steps(*((verb, prompt) for prompt in prompts), gap=gap)


def trace_of_steps(*steps: tuple[Verb, str], gap: float = 1.0) -> Trace:
    builder = TraceBuilder()
    group = builder.add_group(TraceGroup("letters", BLOCK_TOKENS, BLOCK_BYTES))
    for number, (verb, prompt) in enumerate(steps):
        builder.add(number * gap, verb, group, builder.path(group, prompt), len(prompt) * BLOCK_TOKENS)
    return builder.build("letters", "made by hand")


def hits_of_lru(trace: Trace, capacity: int) -> int:
    """Blocks of a plain LRU, a prompt's deepest block used first."""
    there: OrderedDict[int, None] = OrderedDict()
    found = 0
    for step in trace.steps:
        found += next((index for index, block in enumerate(step.blocks) if block not in there), len(step.blocks))
        for block in reversed(step.blocks):
            there.pop(block, None)
            there[block] = None
        while len(there) > capacity:
            there.popitem(last=False)
    return found
