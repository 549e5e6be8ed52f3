"""`tierkv eval`: what is asked of the process with the model, and what is said and kept of what it found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.cli.conftest import Outcome
from tests.verdicts import FP8, measured
from tierkv.config import Settings
from tierkv.core.eval_results import Measured
from tierkv.errors import StorageError
from tierkv.evaluation.messages import EvalMessage, EvalRequest, Finished, Note, Problem, Working, encode_line
from tierkv.node.lock import lock_data_directory
from tierkv.node.start_checks import require_verdict
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import VERDICTS
from tierkv.storage.verdicts import Verdict, read_verdicts

WEIGHTS, ADAPTER = "ab" * 32, "cd" * 32

Tierkv = Callable[..., Outcome]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr("tierkv_cli.eval_process.MODULE", "tests.cli.eval_process_stand_in")
    monkeypatch.setenv("STAND_IN_SAYS", str(tmp_path / "says"))
    monkeypatch.setenv("STAND_IN_REQUEST", str(tmp_path / "request"))

    def prepare(*messages: EvalMessage, then: str = "") -> None:
        (tmp_path / "says").write_bytes(b"".join(map(encode_line, messages)))
        monkeypatch.setenv("STAND_IN_THEN", then)

    prepare(finished())
    return prepare


@pytest.fixture
def eval_(tierkv: Tierkv, tmp_path: Path, says: object) -> Tierkv:
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "prompts").write_text('one\n"two"\n{"prompt": [3, 4]}\n\n{"messages": [{"role": "user"}]}\n')

    def call(*arguments: str) -> Outcome:
        usual = {"--model": tmp_path / "model", "--prompts": tmp_path / "prompts", "--data-dir": tmp_path / "data"}
        given = [part for name, path in usual.items() if name not in arguments for part in (name, str(path))]
        return tierkv("eval", *given, *arguments)

    return call


def finished(result: Measured | None = None, *, adapter: str = "") -> Finished:
    return Finished(
        weights=WEIGHTS,
        adapter=adapter,
        model_name="a [bold]model[/]",
        prompts="12" * 32,
        versions={"torch": "2"},
        measured=result or measured(),
    )


def kept(tmp_path: Path) -> list[Verdict]:
    with DataDirectory.open(tmp_path / "data", create=False, writable=False) as directory:
        found = read_verdicts(directory)
    assert all(isinstance(one, Verdict) for one in found)
    return [one for one in found if isinstance(one, Verdict)]


def test_a_model_that_passes_may_be_served_with_fp8(eval_: Tierkv, tmp_path: Path) -> None:
    done = eval_()
    assert done.code == 0, done.err
    (verdict,) = kept(tmp_path)
    assert (verdict.weights, verdict.codec, verdict.prompts, verdict.block_tokens) == (WEIGHTS, FP8, "12" * 32, 16)
    assert verdict.measured == measured()
    assert verdict.limits == Settings().eval_limits
    assert str(tmp_path / "data" / VERDICTS / verdict.file) in done.out
    assert "passed: serve with codec = fp8" in done.out
    assert "a [bold]model[/]" in done.out
    (judged,) = require_verdict(Settings(data_dir=tmp_path / "data", codec="fp8"))
    assert judged.problem == ""


def test_one_that_fails_is_told_why_and_the_verdict_is_kept(
    eval_: Tierkv, says: Callable[..., None], tmp_path: Path
) -> None:
    says(finished(measured(agreement=0.5, both_found=1)))
    done = eval_()
    assert done.code == 1
    assert "FAILED: agreement is 0.5000, below eval_min_agreement" in done.out
    assert "retrieval is 0.1250, below eval_min_retrieval" in done.out
    (verdict,) = kept(tmp_path)
    assert verdict.measured.agreement == 0.5


def test_the_table_has_every_measure_with_its_limit(eval_: Tierkv) -> None:
    lines = eval_().out.splitlines()
    row = {name: next(line for line in lines if name in line) for name in Settings.model_fields if name[:5] == "eval_"}
    assert len(row) == 4
    assert "99.0 %" in row["eval_min_agreement"]
    assert "0.0010" in row["eval_max_kl"]
    assert "10.000" in row["eval_max_perplexity_ratio"]
    assert "8 of 8" in row["eval_min_retrieval"]
    assert all(line.rstrip().endswith("ok") for line in row.values())


def test_json_is_what_the_table_says(eval_: Tierkv, says: Callable[..., None], tmp_path: Path) -> None:
    says(Working(stage="prompts", done=1, total=2), finished(measured(kl=1.0)))
    done = eval_("--json")
    told = done.json
    assert done.code == 1
    assert told["passed"] is False
    assert "eval_max_kl" in told["problem"]
    assert [(one["setting"], one["holds"]) for one in told["checks"]] == [
        ("eval_min_agreement", True),
        ("eval_max_kl", False),
        ("eval_max_perplexity_ratio", True),
        ("eval_min_retrieval", True),
    ]
    assert told["verdict"]["measured"]["kl"] == 1.0
    assert told["file"] == str(tmp_path / "data" / VERDICTS / kept(tmp_path)[0].file)
    assert {"passed", "problem", "file", "kept", "not_kept", "seconds"} < set(told)
    assert {"checks", "perplexity_ratio", "retrieval", "verdict"} < set(told)
    assert (told["kept"], told["not_kept"]) == (True, "")


def test_limits_are_the_settings_in_force(eval_: Tierkv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_EVAL_MIN_AGREEMENT", "0.995")
    assert eval_().code == 1


def test_what_is_asked_for_is_what_was_given(eval_: Tierkv, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    assert eval_("--adapter", str(tmp_path / "lora"), "--long-context", "--block-tokens", "128").code == 0
    asked = msgspec.json.decode((tmp_path / "request").read_bytes(), type=EvalRequest)
    assert (asked.model, asked.adapter) == (str(tmp_path / "model"), str(tmp_path / "lora"))
    assert (asked.codec, asked.block_tokens, asked.long_context) == (FP8, 128, True)
    assert [(one.line, one.text, one.tokens) for one in asked.prompts] == [
        (1, "one", None),
        (2, "two", None),
        (3, None, [3, 4]),
        (5, None, None),
    ]
    assert asked.prompts[3].messages == [{"role": "user"}]


def test_an_adapter_has_a_verdict_of_its_own(eval_: Tierkv, says: Callable[..., None], tmp_path: Path) -> None:
    assert eval_().code == 0
    says(finished(measured(kl=1.0), adapter=ADAPTER))
    assert eval_().code == 1
    judged = require_verdict(Settings(data_dir=tmp_path / "data", codec="fp8"))
    assert [(one.adapter, bool(one.problem)) for one in judged] == [(ADAPTER, True), ("", False)]


def test_new_weights_leave_the_old_verdict_to_the_old_ones(
    eval_: Tierkv, says: Callable[..., None], tmp_path: Path
) -> None:
    assert eval_().code == 0
    says(msgspec.structs.replace(finished(measured(kl=1.0)), weights="ef" * 32))
    assert eval_().code == 1
    judged = {one.weights: one.problem for one in require_verdict(Settings(data_dir=tmp_path / "data", codec="fp8"))}
    assert judged[WEIGHTS] == ""
    assert "eval_max_kl" in judged["ef" * 32]


def test_it_works_beside_a_running_node(eval_: Tierkv, tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "data").close()
    with lock_data_directory(tmp_path / "data", 0.0):
        assert eval_().code == 0


def test_what_the_process_notes_is_passed_on(eval_: Tierkv, says: Callable[..., None]) -> None:
    says(Note(words="2 of 4 prompts are too short"), finished())
    assert "2 of 4 prompts are too short" in eval_().err


# ---- what goes wrong


def test_without_a_data_directory_there_is_no_place_for_a_verdict(tierkv: Tierkv, tmp_path: Path, says: object) -> None:
    (tmp_path / "p").write_text("one\n")
    done = tierkv("eval", "--model", str(tmp_path), "--prompts", str(tmp_path / "p"))
    assert done.code == 2
    assert "--data-dir" in done.err


def test_a_data_directory_that_is_not_there_is_refused_and_the_nearest_named(eval_: Tierkv, tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "cache").close()
    done = eval_("--data-dir", str(tmp_path / "cahce"))
    assert done.code == 2
    assert f"{tmp_path / 'cahce'} is not there; is {tmp_path / 'cache'} meant?" in done.err
    assert "mkdir" in done.err
    assert not (tmp_path / "cahce").exists()
    assert not (tmp_path / "request").exists()
    assert "mkdir" in eval_("--data-dir", str(tmp_path / "no" / "where")).err


def test_an_empty_folder_becomes_a_data_directory_and_that_is_said(eval_: Tierkv, tmp_path: Path) -> None:
    assert f"made a new data directory in {tmp_path / 'data'}" in eval_().err
    assert "made a new" not in eval_().err


NO_ROOM = StorageError("write", "ENOSPC", "disk_full", "No space left on device")


def raise_no_room(*_: object) -> None:
    raise NO_ROOM


def test_without_room_for_a_verdict_the_model_does_not_run(
    eval_: Tierkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.storage.verdicts.write_small_file", raise_no_room)
    done = eval_()
    assert done.code == 2
    assert f"no verdict can be written to {tmp_path / 'data'}: write failed with ENOSPC" in done.err
    assert "another --data-dir" in done.err
    assert not (tmp_path / "request").exists()


@pytest.mark.parametrize("result", [measured(), measured(kl=1.0)])
def test_what_can_not_be_kept_is_printed_all_the_same(
    eval_: Tierkv, says: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Measured
) -> None:
    says(finished(result))
    monkeypatch.setattr("tierkv.storage.verdicts.write_verdict", raise_no_room)
    done = eval_()
    assert done.code == 4
    (name,) = [line for line in done.err.splitlines() if "could not be written" in line]
    assert str(tmp_path / "data" / VERDICTS) in name
    assert "eval_min_agreement" in done.out
    assert "NOT KEPT: write failed with ENOSPC" in done.out
    assert kept(tmp_path) == []
    told = eval_("--json")
    assert (told.code, told.json["kept"], told.json["not_kept"]) == (4, False, str(NO_ROOM))
    assert told.json["verdict"]["measured"]["kl"] == result.kl

    line = done.out.splitlines()[-1]
    (tmp_path / "data" / VERDICTS / Path(told.json["file"]).name).write_text(line)
    (verdict,) = kept(tmp_path)
    assert verdict.measured == result


def test_nothing_is_left_of_the_proof_that_there_is_room(eval_: Tierkv, tmp_path: Path) -> None:
    assert eval_().code == 0
    assert [path.suffix for path in (tmp_path / "data" / VERDICTS).iterdir()] == [".json"]
    assert list((tmp_path / "data" / "tmp").iterdir()) == []


@pytest.mark.parametrize("is_made", [True, False])
def test_a_directory_that_is_read_only_has_advice_that_an_eval_can_follow(
    eval_: Tierkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    if is_made:
        DataDirectory.open(tmp_path / "data").close()

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("open", "EROFS", "read_only", "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(DataDirectory, "create_temp", refuse)
        patched.setattr("tierkv_cli.eval._is_read_only", lambda path: True)
        done = eval_()
    assert done.code == 2
    assert str(tmp_path / "data") in done.err
    assert "copy the verdict to the node's" in done.err
    assert "start with read_only" not in done.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        (b"", "holds none"),
        (b"\n\n  \n", "holds none"),
        (b"\xff\xfe", "can't be read"),
        (b"{no json\n", "line 1: it begins like JSON"),
        (b'one\n{"prompt": []}\n', "line 2"),
    ],
)
def test_prompts_that_can_not_be_used_are_named_before_the_model_is_loaded(
    eval_: Tierkv, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    done = eval_("--prompts", str(path))
    assert done.code == 2
    assert "--prompts" in done.err
    assert said in done.err
    assert not (tmp_path / "request").exists()


@pytest.mark.parametrize("option", ["--model", "--adapter"])
def test_a_folder_that_is_not_there_is_named(eval_: Tierkv, tmp_path: Path, option: str) -> None:
    done = eval_(option, str(tmp_path / "nowhere"))
    assert done.code == 2
    assert option in done.err
    assert "nowhere" in done.err


@pytest.mark.parametrize(("is_bad_input", "code"), [(True, 2), (False, 4)])
def test_a_problem_is_one_line_and_nothing_is_kept(
    eval_: Tierkv, says: Callable[..., None], tmp_path: Path, is_bad_input: bool, code: int
) -> None:
    says(Problem(words="--prompts: none has 32 tokens", is_bad_input=is_bad_input))
    done = eval_()
    assert done.code == code
    assert "none has 32 tokens" in done.err
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("then", "said"), [("killed", "memory ran out"), ("fails", "ValueError: something of the library's")]
)
def test_a_process_that_dies_is_told_of(
    eval_: Tierkv, says: Callable[..., None], tmp_path: Path, then: str, said: str
) -> None:
    says(Working(stage="prompts", done=0, total=9), then=then)
    done = eval_()
    assert done.code == 4
    assert said in done.err
    assert kept(tmp_path) == []


def test_ctrl_c_ends_the_process_and_keeps_nothing(eval_: Tierkv, says: Callable[..., None], tmp_path: Path) -> None:
    says(Working(stage="prompts", done=0, total=9), then="waits")
    program = (
        "import sys, tierkv_cli.eval_process as p, tierkv_cli.main as m\n"
        "p.MODULE = 'tests.cli.eval_process_stand_in'\n"
        "m.main()"
    )
    arguments = [
        "eval",
        "--model",
        tmp_path / "model",
        "--prompts",
        tmp_path / "prompts",
        "--data-dir",
        tmp_path / "data",
    ]
    asked = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    pid_file = tmp_path / "request.pid"
    deadline = time.monotonic() + 50
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(pid_file.read_text())
    asked.send_signal(signal.SIGINT)
    _, said = asked.communicate(timeout=50)
    assert asked.returncode == 130, said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert kept(tmp_path) == []


def test_a_pipe_that_nobody_reads_is_no_fault(eval_: Tierkv) -> None:
    assert json.loads(eval_("--json").out)["passed"] is True


# ---- the real process


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_real_process_measures_a_tiny_model(
    tierkv: Tierkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.evaluation.tiny_folder import tiny_folder, words
    from tierkv.storage.manifest import fingerprint_model

    folder = tiny_folder(tmp_path / "tiny", max_position_embeddings=256)
    (tmp_path / "prompts").write_text("".join(words(208, seed=number) + "\n" for number in range(2)) + "w5\n")
    monkeypatch.setenv("TIERKV_EVAL_MIN_RETRIEVAL", "0")
    monkeypatch.setenv("TIERKV_EVAL_MIN_AGREEMENT", "0.2")
    monkeypatch.setenv("TIERKV_EVAL_MAX_KL", "9")
    monkeypatch.setenv("TIERKV_EVAL_MAX_PERPLEXITY_RATIO", "9")
    (tmp_path / "data").mkdir(mode=0o700)
    where = ["--model", str(folder), "--data-dir", str(tmp_path / "data")]
    done = tierkv("eval", *where, "--prompts", str(tmp_path / "prompts"), "--json")
    assert done.code == 0, done.err
    verdict = done.json["verdict"]
    assert verdict["weights"] == fingerprint_model(folder).fingerprint
    assert verdict["measured"]["prompts"] == 2
    assert verdict["measured"]["agreement"] > 0.2
    assert {row["context_tokens"] for row in verdict["measured"]["needles"]} == {256}
    assert "1 of 3 prompts are too short" in done.err
