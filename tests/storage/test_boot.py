from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.storage import boot


def test_a_run_of_the_machine_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert boot.boot_id() == boot.boot_id()
    (tmp_path / "boot_id").write_text("5f0c\n")
    monkeypatch.setattr(boot, "BOOT_ID", tmp_path / "boot_id")
    assert boot.boot_id() == "5f0c"


def test_where_the_kernel_does_not_say_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "BOOT_ID", tmp_path / "none")
    assert boot.boot_id() == ""
