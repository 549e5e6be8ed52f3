from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.workers.files import Files, load_files


class Special(Files):
    pass


def test_the_real_ones_are_the_default() -> None:
    assert type(load_files("")) is Files


def test_others_are_named_by_module_and_attribute() -> None:
    assert type(load_files(f"{__name__}:Special")) is Special


@pytest.mark.parametrize("name", ["no.such.module:Files", f"{__name__}:absent", f"{__name__}:__doc__", "builtins:dict"])
def test_what_makes_no_files_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match="files"):
        load_files(name)
