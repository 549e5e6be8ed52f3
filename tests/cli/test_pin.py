"""`tierkv pin`, `unpin` and `pins`: what is asked of the node, what is shown, and what the exit codes say."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import GIB, tier, usage_row
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.errors import WireError
from tierkv.wire.messages import PinnedTier, PinRow, PinsReply, ShareRow

ROW = PinRow(
    pin=bytes.fromhex("3fa2" * 8),
    owner="ann",
    fingerprint="ab" * 32,
    group=bytes(32),
    model_name="llama",
    salt="",
    key=bytes.fromhex("12" * 32),
    blocks=384,
    tokens=6_144,
    tier="host",
    phase="holds",
    cached_blocks=384,
    host_blocks=384,
    host_bytes=2 * GIB,
    nvme_bytes=2 * GIB,
    booked_bytes=2 * GIB,
    made=1_000.0,
    until=0.0,
    recorded=True,
    reason="",
)


def row(**changes: Any) -> PinRow:
    return msgspec.structs.replace(ROW, **changes)


@pytest.fixture
def pinner(node, monkeypatch):
    """The node's pins; what is asked is in `node.asked`, and `refusal` is raised instead of an answer."""

    class Answers:
        rows: tuple[PinRow, ...] = (ROW,)
        refusal: WireError | None = None

    answers = Answers()

    def asked(verb: str, arguments: dict[str, Any]) -> None:
        node._require()
        node.asked.append((verb, arguments))
        if answers.refusal is not None:
            raise answers.refusal

    def pin(self, **arguments: Any) -> PinRow:
        asked("pin", arguments)
        return answers.rows[0]

    def unpin(self, **arguments: Any) -> list[PinRow]:
        asked("unpin", arguments)
        return [msgspec.structs.replace(one, recorded=bool(one.reason)) for one in answers.rows]

    def pins(self) -> PinsReply:
        node._require()
        return PinsReply(
            id=1, rows=answers.rows, tiers=(PinnedTier("host", 4 * GIB, GIB, 2 * GIB),), unreadable=answers.unreadable
        )

    answers.unreadable = 0
    for name, verb in (("pin", pin), ("unpin", unpin), ("pins", pins)):
        monkeypatch.setattr(type(node), name, verb, raising=False)
    node.rows = (usage_row(),)
    return answers


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(" ".join(map(str, range(40))))
    return path


# ---- pin


def test_a_token_file_becomes_the_keys_of_its_full_blocks(tierkv, node, pinner, tokens):
    outcome = tierkv("pin", "--model", "llama", "--token-file", str(tokens), "--for", "12h", "--owner", "ops")
    assert (outcome.code, outcome.err) == (0, "")
    ((_, asked),) = node.asked
    assert asked == {
        "group": bytes(32),
        "keys": chain_keys(bytes(32), pack_tokens(list(range(32))), 16),
        "owner": "ops",
        "tier": "host",
        "seconds": 12 * 3600.0,
    }
    assert outcome.out.startswith("pinned 6,144 tokens (384 blocks) of llama in memory for ann\n")
    assert ROW.pin.hex() in outcome.out


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2,\n3\n"])
def test_token_ids_may_be_a_json_list_or_numbers(tmp_path, text):
    from tierkv_cli.prompts import read_tokens

    (tmp_path / "f").write_text(text)
    assert read_tokens(str(tmp_path / "f")) == [1, 2, 3]


@pytest.mark.parametrize(
    "text", ["one two", "[1, 2", '[1, "x"]', "-1", str(2**32), "[1.5]", "[true]", '{"a": 1}', "\xff"]
)
def test_what_is_no_list_of_token_ids_is_named(tierkv, node, pinner, tmp_path, text):
    (tmp_path / "f").write_text(text, "latin-1")
    outcome = tierkv("pin", "--model", "llama", "--token-file", str(tmp_path / "f"))
    assert (outcome.code, node.asked) == (2, [])
    assert "--token-file" in outcome.err


def test_a_block_names_what_is_cached_up_to_it(tierkv, node, pinner):
    assert tierkv("pin", "--prefix", "0123456789ABCDEF.kv", "--tier", "nvme").code == 0
    ((_, asked),) = node.asked
    assert (asked["prefix"], asked["tier"], asked["owner"]) == ("0123456789abcdef", "nvme", None)


def test_a_prompt_is_tokenized_as_raw_text_by_the_tokenizer_of_the_model(tierkv, node, pinner, tmp_path, monkeypatch):
    called = []

    def tokenize(path: str, tokenizer: str) -> list[int]:
        called.append((path, tokenizer))
        return list(range(16))

    monkeypatch.setattr("tierkv_cli.prompts.tokenize", tokenize)
    assert tierkv("pin", "--model", "abababab", "--prompt-file", "system.txt").code == 0
    assert tierkv("pin", "--model", "llama", "--prompt-file", "system.txt", "--tokenizer", "/models/x").code == 0
    assert called == [("system.txt", "llama"), ("system.txt", "/models/x")]


def test_without_the_extra_a_prompt_file_says_what_to_install(tierkv, node, pinner, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tierkv.integrations.tokenizer", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "f").write_text("You are")
    outcome = tierkv("pin", "--model", "llama", "--prompt-file", str(tmp_path / "f"))
    assert outcome.code == 2
    assert "tierkv-cache[transformers]" in outcome.err
    assert "--token-file" in outcome.err


@pytest.mark.engine
def test_a_tokenizer_that_this_machine_does_not_have_is_named(tierkv, node, pinner, tmp_path):
    (tmp_path / "f").write_text("You are")
    outcome = tierkv("pin", "--model", "llama", "--prompt-file", str(tmp_path / "f"), "--tokenizer", str(tmp_path))
    assert (outcome.code, node.asked) == (2, [])
    assert "no tokenizer of" in outcome.err
    assert "--tokenizer DIR" in outcome.err


@pytest.mark.engine
def test_a_prompt_is_tokenized_by_the_tokenizer_in_a_directory(tierkv, node, pinner, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", *(f"w{n}" for n in range(32))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "f").write_text(" ".join(f"w{n}" for n in range(20)))
    outcome = tierkv("pin", "--model", "llama", "--prompt-file", str(tmp_path / "f"), "--tokenizer", str(tmp_path))
    assert outcome.code == 0, outcome.err
    ((_, asked),) = node.asked
    assert asked["keys"] == chain_keys(bytes(32), pack_tokens(list(range(1, 17))), 16)


def test_a_model_of_several_groups_wants_to_know_which(tierkv, node, pinner, tokens):
    node.rows = (
        usage_row(group=b"\x01" * 32, salt="0011aabb"),
        usage_row(group=b"\x02" * 32, adapter="cd" * 32, adapter_name="legal"),
        usage_row(group=b"\x03" * 32),
    )
    ask = ["pin", "--model", "llama", "--token-file", str(tokens)]
    assert tierkv(*ask, "--group", "0101").code == 0
    assert tierkv(*ask, "--group", "all").code == 0
    asked = [b"\x01", b"\x01", b"\x02", b"\x03"]
    assert [wish["group"][:1] for _, wish in node.asked] == asked
    assert "has no group 77" in tierkv(*ask, "--group", "77").err
    outcome = tierkv(*ask)
    assert outcome.code == 2
    words = " ".join(outcome.err.split())
    assert "llama has 3 groups; say which with --group, or --group all" in words
    assert "010101010101 (tenant 0011aabb, bfloat16" in words
    assert "020202020202 (adapter legal, no tenant, " in words
    assert "030303030303 (no tenant, bfloat16" in words
    assert len(node.asked) == len(asked)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say one of --prompt-file"),
        (["--prefix", "ab" * 8, "--token-file", "f", "--model", "llama"], "say one of --prompt-file"),
        (["--prefix", "ab" * 8, "--model", "llama"], "leave --model out"),
        (["--prefix", "ab" * 8, "--group", "all"], "not for --prefix"),
        (["--token-file", "f"], "whose prompt it is"),
        (["--token-file", "/nowhere", "--model", "llama"], "can't be read"),
        (["--prefix", "ab"], "16 to 64"),
        (["--prefix", "ab" * 8, "--until", "tomorrow"], "is no time"),
        (["--prefix", "ab" * 8, "--until", "2001-01-01"], "is over"),
        (["--prefix", "ab" * 8, "--for", "12"], "span of time"),
        (["--prefix", "ab" * 8, "--for", "12h", "--until", "2101-01-01"], "say one"),
        (["--token-file", "TOKENS", "--model", "nobody"], "no model 'nobody' here"),
    ],
)
def test_what_can_not_be_meant_is_exit_code_2_and_asks_for_nothing(tierkv, node, pinner, tokens, arguments, problem):
    outcome = tierkv("pin", *[str(tokens) if one == "TOKENS" else one for one in arguments])
    assert (outcome.code, node.asked) == (2, [])
    assert problem in outcome.err


def test_a_prompt_of_less_than_a_block_can_not_be_pinned(tierkv, node, pinner, tmp_path):
    (tmp_path / "f").write_text("1 2 3")
    outcome = tierkv("pin", "--model", "llama", "--token-file", str(tmp_path / "f"))
    assert outcome.code == 2
    assert "3 tokens, less than one block of 16" in outcome.err


def test_an_end_may_be_a_time(tierkv, node, pinner):
    assert tierkv("pin", "--prefix", "ab" * 8, "--until", "2101-01-01T18:00").code == 0
    ((_, asked),) = node.asked
    end = time.mktime(time.strptime("2101-01-01 18:00", "%Y-%m-%d %H:%M"))
    assert abs(time.time() + asked["seconds"] - end) < 60


def test_a_refusal_is_told_in_the_words_of_the_node(tierkv, node, pinner):
    pinner.refusal = WireError("invalid", "pins may hold 1 GiB of host (pinned_share), and have 1 GiB (bob 1 GiB)")
    outcome = tierkv("pin", "--prefix", "ab" * 8)
    assert outcome.code == 2
    assert "bob 1 GiB" in outcome.err


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"phase": "waiting", "cached_blocks": 0}, 0, "nothing of it is cached yet"),
        ({"phase": "short"}, 4, "not all of it stays"),
        ({"recorded": False, "reason": "nvme_off"}, 0, "ends with the node"),
        ({"recorded": False, "reason": "disk_full"}, 4, "not written down: disk_full"),
        ({"recorded": False}, 4, "not written down yet"),
    ],
)
def test_what_is_not_as_it_was_asked_for_is_said(tierkv, node, pinner, changes, code, said):
    pinner.rows = (row(**changes),)
    outcome = tierkv("pin", "--prefix", "ab" * 8)
    assert outcome.code == code
    assert said in outcome.err
    as_json = tierkv("pin", "--prefix", "ab" * 8, "--json")
    assert as_json.code == code
    assert json.loads(as_json.out)["pins"][0]["pin"] == ROW.pin.hex()


@pytest.mark.parametrize("command", [["pin", "--prefix", "ab" * 8], ["unpin", "ab" * 16], ["pins"]])
def test_a_node_that_is_away_is_exit_code_5(tierkv, node, pinner, command):
    node.is_there = False
    outcome = tierkv(*command)
    assert outcome.code == 5
    assert "no node answers" in outcome.err


# ---- unpin


def test_an_id_is_named_by_its_first_digits(tierkv, node, pinner):
    outcome = tierkv("unpin", "3FA23fa2")
    assert outcome.code == 0
    assert node.asked == [("unpin", {"pin": ROW.pin})]
    assert outcome.out == "unpinned 3fa23fa2: 6,144 tokens, of ann\n"


def test_all_pins_of_a_prefix_end_together(tierkv, node, pinner):
    pinner.rows = (ROW, row(pin=b"another pin 0001"))
    outcome = tierkv("unpin", "--prefix", "12" * 8, "--json")
    assert outcome.code == 0
    assert node.asked == [("unpin", {"prefix": "12" * 8})]
    assert len(outcome.json["pins"]) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say which"),
        (["3fa23fa2", "--prefix", "12" * 8], "say which"),
        (["3fa2"], "8 to 32"),
        (["zzzzzzzz"], "8 to 32"),
        (["00000000"], "no pins have an id"),
    ],
)
def test_what_names_no_pin_is_exit_code_2(tierkv, node, pinner, arguments, problem):
    outcome = tierkv("unpin", *arguments)
    assert (outcome.code, node.asked) == (2, [])
    assert problem in outcome.err


def test_a_pin_that_is_not_there_is_exit_code_2(tierkv, node, pinner):
    pinner.rows = ()
    assert "no pin abab" in tierkv("unpin", "ab" * 16).err
    assert "no pin ends with" in tierkv("unpin", "--prefix", "12" * 8).err


def test_a_record_that_is_still_there_is_exit_code_4(tierkv, node, pinner):
    pinner.rows = (row(reason="io_error"),)
    outcome = tierkv("unpin", ROW.pin.hex())
    assert outcome.code == 4
    assert "still there: io_error" in outcome.err


# ---- pins


def test_pins_are_listed_with_what_they_hold(tierkv, node, pinner):
    pinner.rows = (
        ROW,
        row(
            owner="bob", phase="partly", cached_blocks=96, until=time.time() + 7_250, reason="disk_full", recorded=False
        ),
    )
    pinner.unreadable = 2
    outcome = tierkv("pins")
    assert outcome.code == 0
    for word in (
        "3fa23fa2",
        "ann",
        "llama",
        "6,144",
        "100 %",
        "25 %",
        "2.0 GiB",
        "host",
        "holds",
        "partly",
        "2 h 0 m",
    ):
        assert word in outcome.out
    assert "25.0 %" in outcome.out, "of what pins may hold of the tier"
    assert "ends with the node: disk_full" in outcome.out
    assert "2 records of pins" in outcome.out


def test_a_narrow_terminal_has_the_names_whole_and_fewer_columns():
    from rich.console import Console

    from tierkv_cli.pins import _rows_table

    for width, shows_all in ((80, False), (100, True)):
        screen = Console(width=width, record=True, file=io.StringIO())
        screen.print(_rows_table((row(owner="nightly"),), width))
        lines = screen.export_text().splitlines()
        assert len(lines) == 3, "nothing is broken"
        assert ("size" in lines[0]) == shows_all


def test_the_list_shows_what_lies_in_the_disk_tier_where_something_does(tierkv, node, pinner, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert " disk " not in tierkv("pins").out.splitlines()[0]
    pinner.rows = (row(host_blocks=0, nvme_blocks=96, disk_blocks=288),)
    head, _, line, *_ = tierkv("pins").out.splitlines()
    assert head.split()[-6:] == ["nvme", "disk", "tier", "state", "ends", "in"]
    assert line.split()[-9:-3] == ["0", "%", "25", "%", "75", "%"]


def test_a_pin_says_in_which_tiers_it_lies(tierkv, node, pinner):
    pinner.rows = (row(host_blocks=0, nvme_blocks=96, disk_blocks=288),)
    outcome = tierkv("pin", "--prefix", "12" * 16)
    assert "384 of 384 blocks, 0 in memory now, 96 on NVMe, 288 in the disk tier" in outcome.out


def test_a_node_without_pins_says_so(tierkv, node, pinner):
    pinner.rows = ()
    outcome = tierkv("pins")
    assert (outcome.code, "nothing is pinned" in outcome.out) == (0, True)
    assert tierkv("pins", "--json").json["pins"] == []


def test_the_list_as_json_has_every_field(tierkv, node, pinner):
    found = tierkv("pins", "--json").json
    assert found["pins"][0] == {name: found["pins"][0][name] for name in PinRow.__struct_fields__}
    assert found["tiers"] == [{"tier": "host", "cap_bytes": 4 * GIB, "held_bytes": GIB, "booked_bytes": 2 * GIB}]
    assert found["unreadable"] == 0


def test_du_shows_what_of_a_tier_is_pinned(tierkv, node):
    node.tiers = (tier("host", capacity_bytes=4 * GIB, used_bytes=2 * GIB),)
    node.pinned = (PinnedTier("host", 2 * GIB, GIB, GIB),)
    outcome = tierkv("du")
    assert "of it pinned" in outcome.out
    assert "1.0 GiB" in outcome.out
    assert tierkv("du", "--json").json["pinned"] == [
        {"tier": "host", "cap_bytes": 2 * GIB, "held_bytes": GIB, "booked_bytes": GIB}
    ]


def test_du_shows_shares_and_what_of_them_is_borrowed(tierkv, node):
    assert "share" not in tierkv("du").out
    node.share_rows = (ShareRow("tenant:acme", "host", 3 * GIB, 2 * GIB), ShareRow("rest", "host", GIB, 2 * GIB))
    outcome = tierkv("du")
    for word in ("tenant:acme", "150.0 %", "1.0 GiB", "rest", "50.0 %"):
        assert word in outcome.out
    assert tierkv("du", "--json").json["shares"][0] == {
        "name": "tenant:acme", "tier": "host", "used_bytes": 3 * GIB, "own_bytes": 2 * GIB
    }  # fmt: skip
