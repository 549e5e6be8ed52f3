"""Where values come from: default < file (TOML) < TIERKV_<NAME> < option, merged, checked, and each remembered.

An unknown name, in the file or in the environment, is an error that names the nearest known one: a setting with a typo
must not be silently absent.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierkv.config.machine import Machine
from tierkv.config.settings import Settings
from tierkv.errors import ConfigError

ENV_PREFIX = "TIERKV_"
FILE_NAME = "tierkv.toml"

RESERVED_VARIABLES = (
    "TIERKV_CONFIG",
    "TIERKV_ENDPOINT",
    "TIERKV_VENV",
    "TIERKV_PYTHON",
    "TIERKV_ENGINES_VENV",
    "TIERKV_ENGINES_PYTHON",
    "TIERKV_EXTRA_INDEX_URL",
    "TIERKV_CACHE",
)
"""Variables of ours that are no settings. Names that begin with TIERKV_TEST_ are left to the test runs."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings in force and where each came from: "default", "<file>:<line>", "TIERKV_<NAME>" or "--<option>"."""

    settings: Settings
    sources: dict[str, str]
    file: Path | None = None


class _Given(NamedTuple):
    value: object
    source: str


def find_file(explicit: Path | None, env: Mapping[str, str]) -> Path | None:
    """The file to read: the explicit one, TIERKV_CONFIG, or tierkv/tierkv.toml of the user's configuration if it
    exists. None: no file. Raises ConfigError where that can't be looked for."""
    if explicit is not None:
        return explicit
    if named := env.get("TIERKV_CONFIG"):
        return Path(named)
    base = env.get("XDG_CONFIG_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))
    usual = root / "tierkv" / FILE_NAME
    try:
        return usual if usual.is_file() else None
    except PermissionError as error:  # in another user's home: whether there is one can't be told
        raise ConfigError("config", f"{usual} can't be looked for: {error.strerror}; name one, or set HOME") from error


def load(
    options: Mapping[str, object],
    env: Mapping[str, str],
    file: Path | None = None,
    *,
    machine: Machine | None = None,
) -> Effective:
    """Merge and check. `options` are those given, by field name (None: not given); `file` is read when not None.
    Raises ConfigError, for unknown names with the nearest known one."""
    given: dict[str, _Given] = {}
    if file is not None:
        given |= _from_file(file)
    given |= _from_env(env)
    given |= _from_options(options)
    values = {name: one.value for name, one in given.items()}
    try:
        settings = Settings.model_validate(values, context={"machine": machine or Machine.here(env)})
    except ConfigError as error:
        source = given[error.field].source if error.field in given else ""
        raise ConfigError(error.field, f"{error.problem} (from {source})" if source else error.problem) from None
    sources = {name: given[name].source if name in given else "default" for name in Settings.model_fields}
    return Effective(settings, sources, file)


def _from_options(options: Mapping[str, object]) -> dict[str, _Given]:
    for name in options:
        if name not in Settings.model_fields:
            raise ConfigError(name, f"isn't a setting{_nearest(name, list(Settings.model_fields))}")
    return {name: _Given(value, option_name(name)) for name, value in options.items() if value is not None}


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def variable_name(field_name: str) -> str:
    return ENV_PREFIX + field_name.upper()


def _from_env(env: Mapping[str, str]) -> dict[str, _Given]:
    fields = {variable_name(name): name for name in Settings.model_fields}
    given = {}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_VARIABLES or variable.startswith("TIERKV_TEST_"):
            continue
        if variable not in fields:
            known = [*fields, *RESERVED_VARIABLES]
            raise ConfigError(variable, f"isn't a variable tierkv knows{_nearest(variable, known)}")
        given[fields[variable]] = _Given(env[variable], variable)
    return given


def _from_file(file: Path) -> dict[str, _Given]:
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError("config", f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{file} isn't UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", f"{file} isn't TOML: {error}") from error
    given = {}
    for name, value in values.items():
        source = f"{file}:{_line_of(name, text)}"
        if name not in Settings.model_fields:
            raise ConfigError(name, f"isn't a setting{_nearest(name, list(Settings.model_fields))} (from {source})")
        given[name] = _Given(value, source)
    return given


def _line_of(name: str, text: str) -> int:
    """Line of a top-level name. The names are plain words, so a line that begins with one is the one."""
    begins = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), start=1) if begins.match(line)), 1)


def _nearest(name: str, known: list[str]) -> str:
    by_tail = {one.removeprefix(ENV_PREFIX): one for one in known}  # a prefix they all share says nothing
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), by_tail, n=1, cutoff=0.5)
    return f"; did you mean {by_tail[close[0]]}?" if close else ""
