"""docs/protocol.md is what the declarations say."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from tierkv.wire.document import document
from tierkv.wire.messages import AnyReply, AnyRequest
from tierkv.wire.session import AnySessionMessage

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == document(), "run: python -m tierkv.wire.document > docs/protocol.md"


def test_every_message_is_on_the_page() -> None:
    text = document()
    for kind in (*get_args(AnyRequest), *get_args(AnyReply), *get_args(AnySessionMessage)):
        assert kind.__name__ in text
