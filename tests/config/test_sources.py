"""Precedence, where a value came from, and names that are nearly right."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest

from tests.config.machines import machine
from tierkv.config import GiB, MiB, Settings, find_file, option_name, variable_name
from tierkv.config.sources import Effective, load
from tierkv.errors import ConfigError


def loaded(options=None, env=None, text: str | None = None, tmp_path: Path | None = None) -> Effective:
    file = None
    if text is not None:
        file = tmp_path / "tierkv.toml"
        file.write_text(text)
    return load(options or {}, env or {}, file, machine=machine())


def refusal(**given) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(**given)
    return caught.value


# For each setting: three different values, as a file, the environment and an option would give them.
VALUES = {
    "data_dir": ('"/a"', "/b", Path("/c")),
    "socket_dir": ('"/a"', "/b", Path("/c")),
    "name": ('"a"', "b", "c"),
    "host_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "gpu_devices": ('"0"', "1,2", "3"),
    "gpu_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "read_only": ("true", "false", True),
    "nvme_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "nvme_reserve_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "disk_dir": ('"/a"', "/b", Path("/c")),
    "disk_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "disk_reserve_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "disk_rescan_seconds": ("1", "2", 3.5),
    "disk_inflight": ("1", "2", 3),
    "nvme_codec": ('"zstd"', "raw", "zstd"),
    "disk_codec": ('"zstd"', "raw", "zstd"),
    "session_bytes": ('"1GiB"', "2GiB", "3GiB"),
    "quarantine_bytes": ("4096", "8192", 12_288),
    "quarantine_days": ("1", "2", 3.5),
    "shares": ('"model:a=1%"', "tenant:b=2%", "tenant:c=3%"),
    "ttl": ('"a=1d"', "b=2d", "c=3d"),
    "auto_pin_share": ('"1%"', "2%", 0.03),
    "pinned_share": ('"5%"', "20%", 0.3),
    "journal_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "journal_days": ("1", "2", 3.5),
    "slab_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "extent_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "seal_after_seconds": ("1", "2", 3.5),
    "touch_seconds": ("1.5", "2.5", 3.5),
    "prefill_tokens_per_second": ("1", "2", 3.5),
    "eviction_policy": ('"lru"', "arc", "gdsf"),
    "nvme_write_bytes_per_day": ('"1GiB"', "2GiB", "3GiB"),
    "index_map_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "codec": ('"fp8"', "raw", "fp8"),
    "eval_min_agreement": ('"90%"', "91%", 0.92),
    "eval_max_kl": ("1", "2", 3.5),
    "eval_max_perplexity_ratio": ("1.5", "2.5", 3.5),
    "eval_min_retrieval": ('"80%"', "91%", 0.92),
    "io_threads": ("1", "2", 3),
    "inflight_writes": ("1", "2", 3),
    "inflight_reads": ("1", "2", 3),
    "direct_io": ('"off"', "auto", "off"),
    "huge_pages": ("false", "true", False),
    "drain_seconds": ("0", "2", 3),
    "lock_wait_seconds": ("0", "2", 3),
    "inline_users": ('"1"', "2,3", "4"),
    "inline_dir": ('"/a"', "/b", Path("/c")),
    "inline_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "reconcile_seconds": ("1", "2", 3),
    "hang_seconds": ("0", "2", 3),
    "stuck_seconds": ("1", "2", 3),
    "metrics_port": ("1", "2", 3),
    "metrics_host": ('"::1"', "0.0.0.0", "10.0.0.1"),
    "record": ('"/a"', "/b", Path("/c")),
    "record_bytes": ('"1MiB"', "2MiB", "3MiB"),
    "log_level": ('"error"', "debug", "warning"),
}


# What a setting needs beside it, once it is given.
GOES_WITH = {"gpu_devices": {"gpu_bytes": "1GiB"}, "gpu_bytes": {"gpu_devices": "0"}}


def test_every_setting_is_tried_below():
    assert set(VALUES) == set(Settings.model_fields)


@pytest.mark.scenario("B238", then="for each setting an option beats a variable beats the file, and its source is told")
@pytest.mark.parametrize("name", VALUES)
def test_an_option_beats_a_variable_beats_the_file_beats_the_default(name, tmp_path):
    in_file, in_env, as_option = VALUES[name]
    beside = {} if name == "data_dir" else {"data_dir": "/d", "disk_dir": "/k"}
    beside = {other: value for other, value in beside.items() if other != name}
    bare, beside = beside, beside | GOES_WITH.get(name, {})
    text, env, option = f"\n{name} = {in_file}\n", {variable_name(name): in_env}, {name: as_option}
    seen = [
        loaded(bare),
        loaded(beside, text=text, tmp_path=tmp_path),
        loaded(beside, env, text, tmp_path),
        loaded(beside | option, env, text, tmp_path),
    ]
    sources = [one.sources[name] for one in seen]
    assert sources == ["default", f"{tmp_path}/tierkv.toml:2", variable_name(name), option_name(name)]
    values = [getattr(one.settings, name) for one in seen]
    assert all(one != other for one, other in pairwise(values))


def test_a_setting_nobody_gave_comes_from_the_default():
    assert set(loaded().sources.values()) == {"default"}


def test_an_option_that_was_not_given_is_none_and_does_not_count():
    assert loaded({"host_bytes": None}, {"TIERKV_HOST_BYTES": "1GiB"}).settings.host_bytes == GiB


@pytest.mark.scenario("B238", then="an unknown key, variable or option ends with 2 and the nearest name")
@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"text": "\n\nhost_byte = 1\n"}, "host_bytes"),
        ({"env": {"TIERKV_HOST_BYTE": "1"}}, "TIERKV_HOST_BYTES"),
        ({"env": {"TIERKV_ENDPIONT": "/x"}}, "TIERKV_ENDPOINT"),
        ({"env": {"TIERKV_DATADIR": "/x"}}, "TIERKV_DATA_DIR"),
        ({"options": {"host_byte": "1"}}, "host_bytes"),
        ({"text": "[metrics]\nport = 1\n"}, "metrics_port"),
    ],
)
def test_a_typo_is_an_error_that_names_what_was_meant(given, nearest, tmp_path):
    error = refusal(**given, tmp_path=tmp_path)
    assert f"did you mean {nearest}?" in error.problem
    assert error.exit_code == 2


@pytest.mark.scenario("B238", then="any name with a letter missing, doubled or swapped is named by the right one")
@pytest.mark.parametrize("name", VALUES)
def test_a_slip_in_any_name_is_caught_in_the_file_and_in_the_environment(name, tmp_path):
    middle = len(name) // 2
    slips = {name[:middle] + name[middle + 1 :], name[:middle] + name[middle] + name[middle:], name + "s"}
    slips |= {name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]}
    for slip in slips - set(Settings.model_fields):
        assert f"did you mean {name}?" in refusal(text=f"{slip} = 1", tmp_path=tmp_path).problem
        variable = variable_name(slip)
        if not variable.startswith("TIERKV_TEST_"):
            assert f"did you mean {variable_name(name)}?" in refusal(env={variable: "1"}).problem


def test_an_unknown_name_like_nothing_is_an_error_without_a_guess():
    assert "did you mean" not in refusal(env={"TIERKV_ZZZZ": "1"}).problem


def test_an_error_says_where_the_wrong_value_is(tmp_path):
    wrong = '# first line\nname = "x"\nhost_bytes = "4Gib"\n'
    assert f"{tmp_path}/tierkv.toml:3" in str(refusal(text=wrong, tmp_path=tmp_path))
    assert "TIERKV_HOST_BYTES" in str(refusal(env={"TIERKV_HOST_BYTES": "lots"}))
    assert "--host-bytes" in str(refusal(options={"host_bytes": "-1"}))


def test_the_line_of_a_table_is_found(tmp_path):
    assert f"{tmp_path}/tierkv.toml:2" in str(refusal(text="\n[cache]\na = 1", tmp_path=tmp_path))


def test_our_other_variables_and_those_of_the_tests_are_no_settings():
    env = {"TIERKV_ENDPOINT": "/run/tierkv", "TIERKV_CONFIG": "/x", "TIERKV_TEST_BARRIER": "1", "PATH": "/bin"}
    assert set(loaded(env=env).sources.values()) == {"default"}


def test_an_empty_variable_is_an_error_and_not_silently_nothing():
    assert refusal(env={"TIERKV_DATA_DIR": ""}).field == "data_dir"


def test_a_wrong_value_that_a_stronger_source_replaces_does_no_harm(tmp_path):
    assert loaded({"host_bytes": "1GiB"}, {"TIERKV_HOST_BYTES": "lots"}).settings.host_bytes == GiB


@pytest.mark.parametrize(
    ("content", "problem"), [(b"host_bytes = ", "isn't TOML"), (b"\xff\xfe", "UTF-8"), (None, "No such file")]
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(content, problem, tmp_path):
    file = tmp_path / "tierkv.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        load({}, {}, file, machine=machine())
    assert str(file) in caught.value.problem


def test_a_directory_as_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        load({}, {}, tmp_path, machine=machine())


def test_a_file_in_which_everything_is_commented_is_fine(tmp_path):
    example = Path(__file__).parents[2] / "conf" / "tierkv.toml"
    assert set(load({}, {}, example, machine=machine()).sources.values()) == {"default"}


def test_the_explicit_file_beats_the_variable_beats_the_users_own(tmp_path):
    own = tmp_path / "tierkv" / "tierkv.toml"
    own.parent.mkdir()
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_file(None, env) is None
    own.touch()
    assert find_file(None, env) == own
    assert find_file(None, env | {"TIERKV_CONFIG": "/e.toml"}) == Path("/e.toml")
    assert find_file(Path("/x.toml"), env | {"TIERKV_CONFIG": "/e.toml"}) == Path("/x.toml")


def test_the_users_own_file_is_below_the_home_directory_when_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / ".config" / "tierkv" / "tierkv.toml"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_file(None, {}) == own


def test_what_depends_on_a_given_value_follows_it():
    assert loaded(env={"TIERKV_HOST_BYTES": "1GiB"}).settings.session_bytes == 512 * MiB


def test_a_home_that_may_not_be_looked_into_is_told_and_not_taken_for_one_without_settings(tmp_path, monkeypatch):
    def refused(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ConfigError, match="can't be looked for: Permission denied; name one, or set HOME"):
        find_file(None, {"XDG_CONFIG_HOME": str(tmp_path)})
    assert find_file(Path("/x.toml"), {}) == Path("/x.toml")
