"""`tierkv why`, with a node whose answers come from the real core."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import FakeNode, status, tier, usage_row
from tests.core.simulation import Bench, Prompt
from tierkv.core.explain import Question
from tierkv.core.explanation import Stretch, Trace
from tierkv.core.grants import GroupSpec, Lease
from tierkv.core.reasons import Reason
from tierkv.storage.manifest import fingerprint_model
from tierkv.wire.messages import ExplainReply
from tierkv_cli.why_words import nvme_in_words, reason_in_words, where_in_words

TOKENS = list(range(1, 41))  # ten blocks of four


class ExplainingNode(FakeNode):
    def __init__(self, bench: Bench) -> None:
        super().__init__(statuses=[status()])
        self.bench = bench

    def explain(self, **question: Any) -> ExplainReply:
        self._require()
        question["wanted"] = question.get("wanted") or {}
        found = self.bench.state.explain(Question(**question))
        return ExplainReply(
            id=1, now=self.bench.now, **{name: getattr(found, name) for name in found.__struct_fields__}
        )


@pytest.fixture
def bench() -> Bench:
    return Bench(host_slots=16, nvme_bytes=0, block_tokens=4, extent_blocks=4)


@pytest.fixture
def node(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> ExplainingNode:
    fake = ExplainingNode(bench)
    weights = bench.spec.identity.weights
    fake.rows = (usage_row(model_name="fake", fingerprint=weights),)
    monkeypatch.setattr("tierkv_cli.reach.operator", lambda where: fake)
    return fake


@pytest.fixture
def prompt_of(tmp_path: Path) -> Any:
    def write(tokens: list[int]) -> str:
        path = tmp_path / "tokens.json"
        path.write_text(json.dumps(tokens))
        return str(path)

    return write


def another_group(bench: Bench, **changes: Any) -> GroupSpec:
    identity = bench.spec.identity
    layout = {name: changes.pop(name) for name in list(changes) if name in identity.layout.__struct_fields__}
    identity = msgspec.structs.replace(identity, layout=msgspec.structs.replace(identity.layout, **layout), **changes)
    spec = replace(bench.spec, group=identity.group_key(), identity=identity)
    bench.absorb(bench.state.open_group(spec, bench.now))
    return spec


def acquire(bench: Bench, prompt: Prompt, name: str) -> None:
    answer, effects = bench.state.acquire(
        grant=bench.grant(),
        session=b"engine",
        group=prompt.group,
        keys=prompt.keys,
        max_blocks=100,
        deadline=bench.now + 10,
        name=name,
        now=bench.now,
    )
    assert isinstance(answer, Lease)
    bench.absorb(effects)
    if answer.blocks:
        bench.release(answer)


# ---- a prompt


def test_a_prompt_that_is_cached_is_no_miss(tierkv, node, bench, prompt_of):
    node.statuses = [status(tiers=(tier("host"),))]
    bench.store(bench.prompt(*TOKENS))
    bench.seal(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("It is no miss now: all 40 tokens of its blocks are in memory.")
    assert "0 to 40" in outcome.out
    assert "memory only" not in outcome.out  # the node has no NVMe to miss it from


def test_what_is_not_on_nvme_yet_says_why(tierkv, node, bench, prompt_of):
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert "tokens 32 to 40 are in memory only: still growing, written when sealed" in outcome.out


def test_the_first_token_that_differs_is_said_with_both_ids(tierkv, node, bench, prompt_of):
    bench.store(bench.prompt(*TOKENS))
    asked = [*TOKENS[:21], 999, *TOKENS[22:]]
    outcome = tierkv("why", "--token-file", prompt_of(asked), "--model", "fake")
    assert "20 of its 40 tokens are cached. From token 20 on nothing is" in outcome.out
    assert "at token 21 this one has id 999, it has 22" in outcome.out
    found = tierkv("why", "--token-file", prompt_of(asked), "--model", "fake", "--json").json
    assert found["cause"] == "tokens"
    assert found["namespaces"][0]["trace"]["leaving"]["token"] == 21


def test_a_prompt_that_is_cached_under_another_element_type_names_the_field(tierkv, node, bench, prompt_of):
    other = another_group(bench, dtype="float16")
    bench.store(Prompt(other, tuple(TOKENS)))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake", "--field", "layout.dtype=u8")
    first = outcome.out.splitlines()[0]
    assert first.startswith("Nothing of it is cached in the namespace that fits, and 40 tokens in another one")
    assert "layout.dtype (u8 wanted, float16 there)" in first
    assert "layout.dtype is the element type (--dtype)" in outcome.out


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tenant", "acme", "salt ("),
        ("--adapter", "ab" * 32, "adapter (abababababab wanted, (none) there)"),
        ("--field", "layout.block_tokens=16", "layout.block_tokens (16 wanted, 4 there)"),
        ("--field", "weights=" + "ab" * 32, "weights (abababababab wanted, ffffffffffff there)"),
    ],
)
def test_what_no_namespace_has_is_said_of_the_nearest(tierkv, node, bench, prompt_of, option, value, words):
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), option, value)
    first = outcome.out.splitlines()[0]
    assert first.startswith("No namespace here is what you described.")
    assert words in first
    assert "has 40 tokens of the prompt" in first
    assert "acme" not in outcome.out


def test_of_several_namespaces_that_fit_it_says_in_what_they_differ(tierkv, node, bench, prompt_of):
    another_group(bench, salt="acme")
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert outcome.out.startswith("Of the 2 namespaces that fit, in fake, u8,")
    assert "They differ in salt" in outcome.out
    alone = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake", "--tenant", "")
    assert alone.out.startswith("It is no miss now")


def test_what_was_evicted_says_when_from_where_and_why(tierkv, node, bench, prompt_of):
    bench.store(bench.prompt(*TOKENS))
    bench.tick(10.0)
    for number in range(3):
        bench.store(bench.prompt(*range(1_000 * number + 100, 1_000 * number + 120)))
    bench.tick(125.0)
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert (
        "left memory 2 m 5 s ago: room was needed for something else (hit 0 times, last used 10 s before)"
        in outcome.out
    )
    assert tierkv("why", "--token-file", prompt_of(TOKENS), "--json").json["cause"] == "evicted"


def test_what_an_engine_is_just_writing_says_so(tierkv, node, bench, prompt_of):
    ticket = bench.reserve(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert "none of its 40 tokens are cached: an engine is writing it just now" in outcome.out.lower()
    bench.absorb(bench.state.abort(ticket.grant, bench.now))


def test_a_prompt_shorter_than_a_block_is_never_cached(tierkv, node, prompt_of):
    outcome = tierkv("why", "--token-file", prompt_of([1, 2]), "--model", "fake")
    assert "The prompt has 2 tokens and a block 4: nothing of it is ever cached." in outcome.out


def test_tokens_that_fill_no_block_are_said_to_be_computed(tierkv, node, bench, prompt_of):
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of([*TOKENS, 7, 8]), "--model", "fake")
    assert outcome.out.startswith("It is no miss now")
    assert "the last 2 tokens fill no block of 4 and are always computed" in outcome.out


def test_an_empty_node_says_that_no_engine_has_been_there(tierkv, node, bench, prompt_of):
    bench.state._ledger.groups.clear()
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS))
    assert outcome.code == 0
    assert "no engine has opened a namespace" in outcome.out


def test_a_node_that_is_not_well_says_so_beside(tierkv, node, bench, prompt_of):
    node.statuses = [status(state="degraded", problems=("nvme is not written to: disk_full",))]
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS))
    assert "the node is degraded: nvme is not written to: disk_full" in outcome.out


def test_a_folder_stands_for_the_model_in_it(tierkv, node, bench, prompt_of, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", str(folder), "--json")
    fingerprint = fingerprint_model(folder).fingerprint
    assert outcome.json["wanted"] == {"weights": fingerprint[:12]}
    assert outcome.json["cause"] == "identity"


def test_the_object_has_what_the_page_says(tierkv, node, bench, prompt_of):
    found = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake", "--json").json
    assert set(found) == {"cause", "headline", "details", "prompt", "wanted", "namespaces"}
    assert found["prompt"] == {"tokens": 40}
    assert set(found["namespaces"][0]["trace"]) == {
        "group", "block_tokens", "asked_blocks", "cached_blocks", "host_blocks", "stretches", "missing", "leaving"
    }  # fmt: skip


# ---- text


def test_text_is_tokenized_as_it_is_by_the_tokenizer_that_is_named(
    tierkv, node, bench, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    bench.store(bench.prompt(*TOKENS))
    asked: list[tuple[str, str]] = []

    def token_ids(text: str, tokenizer: str) -> list[int]:
        asked.append((tokenizer, text))
        return TOKENS

    monkeypatch.setitem(sys.modules, "tierkv.integrations.tokenizer", SimpleNamespace(token_ids=token_ids))
    path = tmp_path / "prompt.txt"
    path.write_text("<|user|>Hello\n")
    outcome = tierkv("why", "--prompt-file", str(path), "--tokenizer", "/models/fake", "--model", "fake")
    assert outcome.out.startswith("It is no miss now")
    assert asked == [("/models/fake", "<|user|>Hello\n")]


def test_without_the_library_text_is_refused_and_told_what_to_do(tierkv, node, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tierkv.integrations.tokenizer", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "prompt.txt"
    path.write_text("hello")
    outcome = tierkv("why", "--prompt-file", str(path), "--model", "fake")
    assert outcome.code == 2
    assert "tierkv-cache[transformers]" in outcome.err


# ---- a request


def test_a_request_is_told_as_it_was(tierkv, node, bench):
    bench.store(bench.prompt(*TOKENS[:20]))
    acquire(bench, bench.prompt(*TOKENS), "cmpl-7")
    bench.tick(60.0)
    outcome = tierkv("why", "cmpl-7")
    assert outcome.code == 0
    assert outcome.out.startswith("It got 20 of 40 tokens. 20 tokens, from token 20 on, were not cached: nobody had")
    assert "request cmpl-7 of fake, asked 1 m 0 s ago" in outcome.out
    found = tierkv("why", "cmpl-7", "--json").json
    assert (found["cause"], found["request"]["tokens"], found["of_that_name"]) == ("unknown", 20, 1)


def test_a_request_whose_prompt_was_stored_since_says_so(tierkv, node, bench):
    acquire(bench, bench.prompt(*TOKENS), "cmpl-8")
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "cmpl-8")
    assert outcome.out.startswith("It got nothing. None of its 40 tokens were cached")
    assert "now 40 tokens of it are cached: stored since, most likely by this very request" in outcome.out


def test_a_request_that_missed_what_another_namespace_has_names_the_field(tierkv, node, bench):
    other = another_group(bench, dtype="float16")
    bench.store(Prompt(other, tuple(TOKENS)))
    acquire(bench, bench.prompt(*TOKENS), "cmpl-9")
    bench.store(bench.prompt(*TOKENS[:8]))  # which tells its first tokens
    outcome = tierkv("why", "cmpl-9")
    assert "has 8 tokens of the same prompt; it differs in layout.dtype (u8 wanted, float16 there)" in outcome.out


def test_a_request_that_nobody_remembers_is_exit_code_4(tierkv, node, bench):
    acquire(bench, bench.prompt(*TOKENS), "cmpl-7")
    outcome = tierkv("why", "somebody-else")
    assert (outcome.code, outcome.out) == (4, "")
    assert "no request 'somebody-else' is remembered; the node remembers 1 request" in outcome.err


def test_the_last_misses_are_a_table(tierkv, node, bench):
    bench.store(bench.prompt(*TOKENS[:20]))
    for name in ("first", "second"):
        acquire(bench, bench.prompt(*TOKENS), name)
    acquire(bench, bench.prompt(*TOKENS[:20]), "a hit")
    outcome = tierkv("why", "--last")
    lines = outcome.out.splitlines()
    assert lines[0].split()[:2] == ["asked", "request"]
    assert [line.split()[3] for line in lines[2:4]] == ["second", "first"]
    assert "50.0 %" in lines[2]
    assert "never stored from 20 on" in lines[2]
    assert "a hit" not in outcome.out
    found = tierkv("why", "--last", "1", "--json").json
    assert [one["name"] for one in found["misses"]] == ["second"]
    assert found["remembered"] == 3


def test_without_a_miss_the_table_says_so(tierkv, node, bench):
    outcome = tierkv("why", "--last")
    assert outcome.out == "no request has missed anything\nthe node remembers none yet\n"


def test_what_an_engine_calls_its_requests_can_not_steer_the_terminal(tierkv, node, bench):
    acquire(bench, bench.prompt(*TOKENS), "evil\x1b[2Jname")
    for arguments in (("why", "--last"), ("why", "evil\x1b[2Jname"), ("why", "nobody\x1b[2J")):
        outcome = tierkv(*arguments)
        assert "\x1b" not in outcome.out + outcome.err


# ---- usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say one of"),
        (("cmpl-7", "--last"), "say one of"),
        (("cmpl-7", "--model", "fake"), "are for a prompt"),
        (("--last", "--field", "salt="), "are for a prompt"),
        (("--last", "0"), "--last"),
        (("--token-file", "/nowhere"), "can't be read"),
        (("--prompt-file", "/nowhere"), "needs a tokenizer"),
    ],
)
def test_wrong_usage_says_what_is_wrong(tierkv, node, arguments, words):
    outcome = tierkv("why", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_field_that_no_identity_has_is_named_with_those_that_there_are(tierkv, node, prompt_of):
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--field", "dtype=float16")
    assert outcome.code == 2
    assert "'dtype=float16' is no NAME=VALUE with one of weights, config, layout.dtype" in outcome.err


def test_a_model_that_the_node_does_not_know_is_named_with_those_that_it_does(tierkv, node, prompt_of):
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "mistral")
    assert outcome.code == 2
    assert "no model 'mistral' here; there is 'fake'" in outcome.err


def test_a_node_that_is_away_is_exit_code_5(tierkv, node, prompt_of):
    node.is_there = False
    for arguments in (("cmpl-7",), ("--last",), ("--token-file", prompt_of(TOKENS))):
        outcome = tierkv("why", *arguments)
        assert (outcome.code, outcome.out) == (5, "")


@pytest.mark.parametrize("content", ["1 2 3 4", "1,2,3,4", "1\n2\n3\n4\n", "[1, 2, 3, 4]"])
def test_tokens_are_read_in_each_of_their_forms(tierkv, node, bench, tmp_path, content):
    bench.store(bench.prompt(1, 2, 3, 4))
    path = tmp_path / "tokens"
    path.write_text(content)
    assert tierkv("why", "--token-file", str(path)).out.startswith("It is no miss now: all 4 tokens")


@pytest.mark.parametrize("content", ["one two", "[1.5]", "[true]", "-1", "4294967296", "{}", "[[1]]"])
def test_what_is_no_list_of_tokens_is_refused(tierkv, node, tmp_path, content):
    path = tmp_path / "tokens"
    path.write_text(content)
    outcome = tierkv("why", "--token-file", str(path))
    assert outcome.code == 2
    assert "--token-file" in outcome.err


def test_of_missing_tokens_that_are_missing_for_several_causes_each_is_said(tierkv, node, bench, prompt_of):
    bench.store(bench.prompt(*TOKENS[:8]))
    bench.store(bench.prompt(*TOKENS[:20]), first=3)  # behind a hole
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    said = "of the missing tokens 8 are stored, and wait for other ranks or for what comes before them, 24 were never"
    assert said in outcome.out


def test_a_request_says_when_what_is_missing_now_has_gone(tierkv, node, bench):
    bench.store(bench.prompt(*TOKENS))
    acquire(bench, bench.prompt(*TOKENS), "cmpl-1")
    bench.tick(10.0)
    for number in range(4):
        bench.store(bench.prompt(*range(1_000 * number + 100, 1_000 * number + 120)))
    bench.tick(60.0)
    outcome = tierkv("why", "cmpl-1")
    assert outcome.out.startswith("It was no miss: it got all 40 tokens that it asked for.")
    assert "what is missing now left memory 1 m 0 s ago: room was needed for something else" in outcome.out
    assert "not cached" in outcome.out
    assert "left memory 1 m 0 s ago" in outcome.out


def test_a_node_that_writes_nothing_says_so(tierkv, node, bench, prompt_of):
    node.statuses = [status(warnings=("read_only is set: files are read, nothing is written to the data directory",))]
    bench.store(bench.prompt(*TOKENS))
    outcome = tierkv("why", "--token-file", prompt_of(TOKENS), "--model", "fake")
    assert "the node is read only: what engines store stays in memory" in outcome.out


# ---- with a disk tier


def stretch(tokens: int, *tiers: str, disk: str = "absent") -> Stretch:
    return Stretch(
        first_token=0,
        tokens=tokens,
        tiers=tiers,
        growing=False,
        nvme="present" if "nvme" in tiers else "absent",
        why_not_there="",
        being_read=False,
        extents=1,
        hits=0,
        last_used=0.0,
        disk=disk,
    )


def trace(*stretches: Stretch) -> Trace:
    return Trace(group=bytes(32), asked_blocks=1, cached_blocks=1, block_tokens=16, host_blocks=0, stretches=stretches)


@pytest.mark.parametrize(
    ("stretches", "words"),
    [
        ([stretch(16, "disk")], "in the disk tier"),
        ([stretch(16, "gpu", "host")], "on a GPU"),
        ([stretch(16, "gpu"), stretch(32, "host")], "cached, 16 of them on a GPU and 32 in memory only"),
        ([stretch(16, "nvme", "disk")], "on NVMe"),
        ([stretch(16, "host"), stretch(32, "nvme")], "cached, 16 of them in memory and 32 on NVMe only"),
        (
            [stretch(16, "host", "disk"), stretch(32, "nvme"), stretch(1_024, "disk")],
            "cached, 16 of them in memory, 32 on NVMe and 1,024 in the disk tier only",
        ),
    ],
)
def test_each_token_is_where_it_is_had_the_fastest(stretches: list[Stretch], words: str) -> None:
    assert where_in_words(trace(*stretches)) == words


def test_what_is_in_the_disk_tier_alone_is_on_no_way_to_nvme_and_what_is_copied_there_says_so() -> None:
    assert nvme_in_words(stretch(16, "disk", disk="present")) == ""
    assert nvme_in_words(stretch(16, "nvme", disk="writing")) == "being copied to the disk tier"


@pytest.mark.parametrize(
    "reason", [Reason.SLOWER_THAN_COMPUTE, Reason.DISK_BEHIND, Reason.DISK_DEGRADED, Reason.NAME_TAKEN]
)
def test_each_reason_of_the_disk_tier_has_words(reason: Reason) -> None:
    assert "disk tier" in reason_in_words(reason)
