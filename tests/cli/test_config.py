from __future__ import annotations

import pytest

from tierkv.config import Settings


@pytest.mark.scenario("B238", then="`tierkv config` shows each setting in force and where it came from")
def test_every_setting_is_shown_with_its_source(tierkv, monkeypatch, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text('\nhost_bytes = "128MiB"\n')
    monkeypatch.setenv("TIERKV_LOG_LEVEL", "debug")
    outcome = tierkv("config", "--config", str(file), "--data-dir", str(tmp_path / "d"))
    assert outcome.code == 0
    lines = {line.split()[0]: line.split() for line in outcome.out.splitlines() if line[:1].isalpha()}
    assert set(Settings.model_fields) <= set(lines)
    assert lines["host_bytes"][1:] == ['"128MiB"', f"{file}:2"]
    assert lines["log_level"][1:] == ['"debug"', "TIERKV_LOG_LEVEL"]
    assert lines["data_dir"][1:] == [f'"{tmp_path}/d"', "--data-dir"]
    assert lines["io_threads"][1:] == ["4", "default"]


def test_room_on_disk_that_is_left_open_is_told_by_what_it_comes_to(tierkv, tmp_path):
    def shown(*arguments: str) -> str:
        out = tierkv("config", *arguments).out
        return " ".join(out[out.index("nvme_bytes") : out.index("nvme_reserve_bytes")].split())

    assert shown("--data-dir", str(tmp_path / "d")).startswith("nvme_bytes 80 % of what is free")
    assert shown() == "nvme_bytes none default"


def test_json_has_values_and_sources(tierkv):
    found = tierkv("config", "--json").json
    assert found["file"] is None
    assert found["settings"]["slab_bytes"] == {"value": 64 * 2**20, "source": "default"}
    assert found["settings"]["data_dir"]["value"] is None


def test_a_wrong_setting_is_exit_code_2_and_names_it(tierkv, monkeypatch):
    monkeypatch.setenv("TIERKV_HOST_BYTES", "900000GiB")
    outcome = tierkv("config")
    assert outcome.code == 2
    assert "host_bytes" in outcome.err
    assert "TIERKV_HOST_BYTES" in outcome.err
