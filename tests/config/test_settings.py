"""What each setting accepts, what it is when nobody sets it, and what is said when it can't be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.config.machines import machine
from tierkv.config import GiB, KiB, Machine, MiB, Settings
from tierkv.errors import ConfigError


def settings(on: Machine | None = None, **given: object) -> Settings:
    return Settings.model_validate(given, context={"machine": on or machine()})


def refusal(on: Machine | None = None, **given: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings(on, **given)
    return caught.value


def test_nothing_given_is_a_node_in_memory_only():
    found = settings()
    assert found.data_dir is None
    assert found.nvme_bytes is None
    assert found.nvme_reserve_bytes == 0
    assert found.metrics_port is None
    assert found.socket_dir == Path("/run/user/7/tierkv/memory")


@pytest.mark.scenario("B091", then="by default a quarter of the smaller of machine and control group")
def test_host_memory_is_a_quarter_of_what_the_machine_or_the_control_group_has():
    assert settings().host_bytes == 8 * GiB
    assert settings(machine(cgroup_bytes=2 * GiB)).host_bytes == 512 * MiB


def test_a_session_may_hold_half_of_host_memory():
    assert settings(host_bytes="1GiB").session_bytes == 512 * MiB
    assert settings(host_bytes="1GiB", session_bytes="64MiB").session_bytes == 64 * MiB


def test_the_reserve_is_a_twentieth_of_the_file_system_but_not_more_than_10_gib():
    assert settings(data_dir="/d").nvme_reserve_bytes == 10 * GiB
    assert settings(machine(disk_bytes=100 * GiB), data_dir="/d").nvme_reserve_bytes == 5 * GiB
    assert settings(data_dir="/d", nvme_reserve_bytes=0).nvme_reserve_bytes == 0


def test_the_socket_directory_follows_the_real_path_of_the_data_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    real, alias = settings(data_dir=tmp_path / "real"), settings(data_dir=tmp_path / "alias")
    assert real.socket_dir == alias.socket_dir
    assert real.socket_dir != settings(data_dir=tmp_path / "other").socket_dir
    assert alias.data_dir == tmp_path / "alias"  # the storage layer refuses it, by its own name


def test_nodes_without_a_data_directory_are_told_apart_by_name():
    assert settings(name="blue").socket_dir != settings(name="green").socket_dir


def test_a_relative_data_directory_belongs_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings(data_dir="kv").data_dir == tmp_path / "kv"


def test_a_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    assert settings(data_dir="~/kv").data_dir == Path("/home/u/kv")


def test_more_host_memory_than_the_machine_has_is_refused_with_both_numbers():
    error = refusal(machine(memory_bytes=24 * GiB - 4 * KiB), host_bytes="64GiB")
    assert error.field == "host_bytes"
    assert "64GiB is more than the memory of this machine, 24.0 GiB" in error.problem


@pytest.mark.scenario("B091", then="more than the control group has is refused with both numbers")
def test_more_host_memory_than_the_control_group_allows_is_refused_with_both_numbers():
    error = refusal(machine(cgroup_bytes=2 * GiB), host_bytes="3GiB")
    assert error.field == "host_bytes"
    assert "3GiB is more than the memory limit of this control group, 2GiB" in error.problem


def test_host_memory_of_less_than_a_slab_is_refused():
    assert refusal(host_bytes="1MiB").field == "host_bytes"
    assert settings(host_bytes="1MiB", slab_bytes="1MiB").host_bytes == MiB


@pytest.mark.parametrize("field", [name for name in Settings.model_fields if name.endswith("_bytes")])
@pytest.mark.parametrize("wrong", ["-4GiB", "4Gib", "4 parsecs", "nan", "", -1, 1.5, True, []])
def test_a_wrong_size_is_refused_by_the_name_of_its_field(field, wrong):
    error = refusal(data_dir="/d", **{field: wrong})
    assert error.field == field
    assert "write" in error.problem


@pytest.mark.parametrize("field", [name for name in Settings.model_fields if name.endswith(("_seconds", "_days"))])
@pytest.mark.parametrize("wrong", ["-1", "10s", "nan", "inf", "", -0.5, float("nan"), float("inf"), 10**400, True, []])
def test_a_wrong_duration_is_refused_by_the_name_of_its_field(field, wrong):
    assert refusal(**{field: wrong}).field == field


@pytest.mark.parametrize("field", ["seal_after_seconds", "touch_seconds"])
def test_an_interval_of_0_is_refused(field):
    assert refusal(**{field: 0}).field == field


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("io_threads", 0),
        ("io_threads", "four"),
        ("inflight_writes", 0),
        ("inflight_reads", 2.5),
        ("metrics_port", 0),
        ("metrics_port", 65_536),
        ("metrics_port", "http"),
        ("metrics_host", ""),
        ("metrics_host", "http://here"),
        ("direct_io", "on"),
        ("nvme_codec", "gzip"),
        ("disk_codec", ""),
        ("log_level", "loud"),
        ("huge_pages", "yes"),
        ("huge_pages", 1),
        ("name", "two words"),
        ("name", "../up"),
        ("data_dir", ""),
        ("data_dir", "nul\0"),
        ("data_dir", 5),
        ("slab_bytes", 0),
        ("slab_bytes", 4097),
        ("index_map_bytes", 1),
        ("extent_bytes", 10),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field, wrong):
    assert refusal(**{field: wrong}).field == field


def test_no_room_on_nvme_with_a_data_directory_is_refused():
    assert "leave data_dir out" in refusal(data_dir="/d", nvme_bytes=0).problem


def test_room_on_nvme_without_a_data_directory_is_refused():
    assert refusal(nvme_bytes="1GiB").field == "nvme_bytes"


def test_less_room_on_nvme_than_an_extent_is_refused():
    assert refusal(data_dir="/d", nvme_bytes="1MiB").field == "nvme_bytes"
    assert settings(data_dir="/d", nvme_bytes="1MiB", extent_bytes="64KiB").nvme_bytes == MiB


def test_a_disk_tier_needs_nvme_above_it_and_a_directory_of_its_own():
    assert settings(data_dir="/a/d", disk_dir="/a/k").disk_dir == Path("/a/k")
    assert "needs data_dir" in refusal(disk_dir="/k").problem
    assert "the same as data_dir" in refusal(data_dir="/d", disk_dir="/x/../d").problem
    assert "lies in data_dir" in refusal(data_dir="/d", disk_dir="/d/k").problem
    assert "data_dir lies in /k" in refusal(data_dir="/k/d", disk_dir="/k").problem
    error = refusal(data_dir="/d", disk_dir="/k", record="/k/requests.jsonl")
    assert (error.field, "lies in disk_dir" in error.problem) == ("record", True)


def test_room_on_disk_without_a_disk_directory_or_for_less_than_an_extent_is_refused():
    assert refusal(data_dir="/d", disk_bytes="1GiB").field == "disk_bytes"
    assert refusal(data_dir="/d", disk_dir="/k", disk_bytes="1MiB").field == "disk_bytes"
    assert refusal(data_dir="/d", disk_dir="/k", disk_bytes=0).field == "disk_bytes"


def test_devices_are_named_by_number_or_cpu_each_once_and_with_their_room():
    found = settings(gpu_devices=[0, 1], gpu_bytes="1GiB")
    assert (found.device_names, found.device_bytes) == (("0", "1"), (GiB, GiB))
    assert settings(gpu_devices="cpu, cpu:1,07", gpu_bytes="1GiB").device_names == ("cpu", "cpu:1", "7")
    assert settings(gpu_devices=2, gpu_bytes="1GiB").gpu_devices == "2"
    assert "comes twice" in refusal(gpu_devices="1,01", gpu_bytes="1GiB").problem
    assert refusal(gpu_devices="1").field == "gpu_bytes"
    assert refusal(gpu_bytes="1GiB").field == "gpu_bytes"
    assert "less than one slab" in refusal(gpu_devices="1", gpu_bytes="1MiB").problem
    assert "multiple of 4KiB" in refusal(gpu_devices="1", gpu_bytes=GiB + 1).problem
    assert "more than any GPU has" in refusal(gpu_devices="1", gpu_bytes="17TiB").problem


def test_what_is_wrong_with_a_list_of_devices_is_said_with_what_to_write():
    assert "cpu:1" in refusal(gpu_devices="cuda:0", gpu_bytes="1GiB").problem
    for wrong in ("0,", ",0", "0,,1"):
        assert "a comma too many" in refusal(gpu_devices=wrong, gpu_bytes="1GiB").problem


@pytest.mark.parametrize("wrong", ["cuda:0", "-1", "cpu:0", "GPU-1", "0,", "0 1", True, {}, None.__class__, 2.5])
def test_what_is_no_device_is_refused(wrong):
    assert refusal(gpu_devices=wrong, gpu_bytes="1GiB").field == "gpu_devices"


def test_a_disk_directory_is_not_looked_at_for_the_defaults():
    """A file server that doesn't answer must not hold up whoever reads settings."""
    asked = []
    here = Machine(32 * GiB, None, lambda path: asked.append(path) or 1000 * GiB, {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert settings(here, data_dir="/d", disk_dir="/k").disk_reserve_bytes == 10 * GiB
    assert set(asked) == {Path("/d")}


def test_a_socket_directory_whose_sockets_would_have_too_long_a_path_is_refused():
    fits = "/" + "x" * (107 - len("/session.sock") - 1)
    assert settings(socket_dir=fits).socket_dir == Path(fits)
    error = refusal(socket_dir=fits + "x")
    assert error.field == "socket_dir"
    assert "1 bytes longer" in error.problem


def test_a_runtime_directory_that_makes_the_default_too_long_names_socket_dir():
    assert refusal(machine(environ={"XDG_RUNTIME_DIR": "/" + "x" * 90})).field == "socket_dir"


def test_an_unknown_field_is_not_accepted_silently():
    with pytest.raises(ValueError, match="hostbytes"):
        settings(hostbytes=1)


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        settings().name = "other"


# ---- tenants that are not trusted


def test_users_are_named_or_numbered_and_each_counts_once():
    found = settings(inline_users=" root, 1001,0,1001 ", session_bytes="8MiB")
    assert (found.inline_users, found.inline_uids) == ("root,1001,0,1001", (0, 1001))
    assert found.inline_bytes == 4 * MiB
    assert settings(inline_users=1001).inline_uids == (1001,)
    nobody = settings()
    assert (nobody.inline_users, nobody.inline_uids, nobody.inline_bytes) == ("", (), nobody.session_bytes)


@pytest.mark.parametrize(
    "users", ["no such user", "1001,", ",", "-1", str(2**32 - 1), "99999999999", "65534", True, 1.5, ["a"]]
)
def test_a_user_that_can_not_be_is_refused(users):
    assert refusal(inline_users=users).field == "inline_users"


def test_more_users_than_a_gateway_serves_are_refused():
    assert refusal(inline_users=",".join(map(str, range(65)))).field == "inline_users"


def test_the_inline_directory_is_found_by_the_last_part_of_the_socket_directory_outside_of_it():
    found = settings(inline_users="1", socket_dir="/run/tierkv")
    assert found.inline_dir == Path(f"/tmp/tierkv-{os.getuid()}-inline/tierkv")
    for inside in ("/run/tierkv", "/run/tierkv/inline"):
        assert refusal(inline_users="1", socket_dir="/run/tierkv", inline_dir=inside).field == "inline_dir"


def test_an_inline_directory_whose_sockets_would_have_too_long_a_path_is_refused():
    longest = len("/4294967295.sock")
    fits = "/" + "x" * (107 - longest - 1)
    assert settings(inline_users="1", inline_dir=fits).inline_dir == Path(fits)
    assert refusal(inline_users="1", inline_dir=fits + "x").field == "inline_dir"
    assert settings(inline_dir=fits + "x").inline_dir == Path(fits + "x")  # nobody connects there


def test_a_reserve_of_the_whole_file_system_is_refused_and_one_that_has_no_size_is_none_of_that(tmp_path):
    on = machine(disk_bytes=10 * GiB)
    assert settings(on, data_dir=tmp_path, nvme_reserve_bytes="9GiB").nvme_reserve_bytes == 9 * GiB
    assert refusal(on, data_dir=tmp_path, nvme_reserve_bytes="10GiB").field == "nvme_reserve_bytes"
    nothing_said = machine(disk_bytes=0)
    assert settings(nothing_said, data_dir=tmp_path).nvme_reserve_bytes == 0
    assert settings(nothing_said, data_dir=tmp_path, nvme_reserve_bytes="1GiB").nvme_reserve_bytes == GiB


def test_a_user_must_be_able_to_hold_something():
    assert refusal(inline_users="1", inline_bytes="1").field == "inline_bytes"


@pytest.mark.parametrize(
    ("ttl", "problem"),
    [
        ("acme", "isn't a tenant and its time"),
        ("acme=7", "isn't a span of time"),
        ("acme=0s", "no time at all"),
        ("acme=7d,acme=8d", "acme comes twice"),
        ("digest:12=7d", "digest:0123abcd"),
        ("=7d", "has no name"),
        (7, "isn't a list of times"),
    ],
)
def test_a_list_of_times_that_is_none_names_what_is_wrong(ttl, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        settings(ttl=ttl)
    assert caught.value.field == "ttl"


def test_a_list_of_times_is_read_in_order_and_a_salt_may_have_an_equals_sign():
    assert settings(ttl=" a=b=1d ,default = 2h").ttl_rules == (("a=b", 86_400.0), ("default", 7_200.0))
    assert settings().ttl_rules == ()


@pytest.mark.parametrize(("given", "share"), [("10%", 0.1), ("12.5 %", 0.125), ("0.25", 0.25), (0, 0.0), (1, 1.0)])
def test_a_share_is_a_percentage_or_a_part_of_one(given, share):
    assert settings(pinned_share=given).pinned_share == share


@pytest.mark.parametrize("given", ["10", "101%", "-1", 1.5, "half", True, "1/2"])
def test_what_is_no_share_is_refused(given):
    with pytest.raises(ConfigError, match="isn't a share"):
        settings(pinned_share=given)


def test_automatic_pins_are_a_part_of_all_pins():
    assert settings(auto_pin_share="5%").auto_pin_share == 0.05
    assert "part of pinned_share" in str(refusal(auto_pin_share="20%"))


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ("model:llama", "isn't a name and its share"),
        ("llama=40%", "neither a model nor a tenant"),
        ("tenant:a=40", "isn't a share"),
        ("tenant:a=60%,tenant:b=50%", "110 % in all"),
        ("tenant:a=1%,tenant:a=2%", "comes twice"),
        (0.5, "isn't a list of shares"),
    ],
)
def test_a_list_of_shares_that_is_none_names_what_is_wrong(shares, problem):
    found = refusal(shares=shares)
    assert found.field == "shares"
    assert problem in found.problem


def test_shares_are_read_in_order():
    given = "model:llama=40%, tenant:digest:0123abcd = 0.2"
    assert settings(shares=given).share_rules == (("model:llama", 0.4), ("tenant:digest:0123abcd", 0.2))


def test_a_codec_of_a_tier_that_is_not_there_is_refused_by_name():
    assert refusal(nvme_codec="zstd").field == "nvme_codec"
    assert refusal(data_dir="/d", disk_codec="zstd").field == "disk_codec"
    found = settings(data_dir="/d", disk_dir="/k", disk_codec="zstd")
    assert (found.nvme_codec, found.disk_codec) == ("raw", "zstd")
    assert settings(nvme_codec="raw", disk_codec="raw").data_dir is None
