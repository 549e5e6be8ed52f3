"""What may happen to any request, whatever it is for: the events that the matrices of reads and writes share."""

from __future__ import annotations

from typing import Protocol

from tests.core.simulation import Prompt
from tests.node.stamped_node import ASKER, HOLDER, LATER, StampedNode
from tierkv.wire.messages import ReportBad


class Story(Protocol):
    """One request, asked for by ASKER and held by HOLDER."""

    node: StampedNode
    prompt: Prompt
    has_holder: bool


def holder_dies(story: Story) -> None:
    story.node.end_session(HOLDER)
    story.has_holder = False


def asker_dies(story: Story) -> None:
    story.node.end_session(ASKER)


def worker_dies(story: Story) -> None:
    story.node.kill_worker()
    story.node.start_worker()


def told_twice(story: Story) -> None:
    story.node.hear_again()


def eviction(story: Story) -> None:
    story.node.fill_host(but=story.prompt)


def report_bad(story: Story) -> None:
    prompt = story.prompt
    story.node.send(ReportBad, LATER, group=prompt.group, keys=prompt.keys, first_bad=1)
