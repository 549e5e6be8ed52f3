"""What every engine's connector needs, without a word of any engine.

    prefix      what holds for any request: keys of its blocks, how many may be loaded, which are to be stored
    transfer    blocks from the node into an engine's memory and back
    fence       a fault of ours is a miss

and, for an engine whose scheduler and workers are processes of their own and must never wait:

    scheduler   who asks the node for a request
    worker      who moves the bytes, out of and into pages
    plan        what the one tells the other
"""
