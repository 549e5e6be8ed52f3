"""Words about the settings, for people: conf/tierkv.toml, the options of `tierkv serve`, `tierkv config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic.fields import FieldInfo

from tierkv.config.settings import Settings
from tierkv.config.sizes import KiB, format_size


@dataclass(frozen=True, slots=True)
class SettingWords:
    """What people are told about one setting. `example` is a TOML value: the default where it is a plain one."""

    name: str
    meaning: str
    unit: str
    default: str
    example: str
    topic: str


def describe() -> list[SettingWords]:
    return [_describe(name, info) for name, info in Settings.model_fields.items()]


def _describe(name: str, info: FieldInfo) -> SettingWords:
    extra = info.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError(f"the setting {name} isn't declared with _setting")
    words = {key: str(value) for key, value in extra.items()}
    plain = _toml(info.default, words["unit"])
    return SettingWords(
        name=name,
        meaning=info.description or "",
        unit=words["unit"],
        default=words["default_text"] or plain,
        example=words["example"] or plain,
        topic=words["topic"],
    )


def format_value(name: str, value: object) -> str:
    """A value as a file would have it. A setting that is left open is told by what it comes to: "none, no endpoint"."""
    extra = Settings.model_fields[name].json_schema_extra
    if value is None:
        return str(extra.get("default_text") or "none") if isinstance(extra, dict) else "none"
    return _toml(value, str(extra.get("unit", "")) if isinstance(extra, dict) else "")


def _toml(value: object, unit: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if unit == "size" and isinstance(value, int):
        return f'"{format_size(value)}"' if value and value % KiB == 0 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


_FILE_HEAD = """\
# Settings of a tierkv node. Every option is here, commented out, with its default.
# Precedence: default < this file < TIERKV_<NAME> in the environment < --<name> of `tierkv serve`.
# `tierkv config` shows what is in force and where each value came from.
# Sizes: "512MiB", "4GiB", "10GB", or whole bytes. Times: seconds, without a unit.
# Made from tierkv/config.py by `python -m tierkv.config`.
"""


def example_file() -> str:
    """conf/tierkv.toml."""
    parts = [_FILE_HEAD]
    for words in describe():
        if words.topic:
            parts.append(f"\n\n# ---- {words.topic}\n")
        lines = [f"# {line}" for line in _wrap(words.meaning)]
        unit = f" ({words.unit})" if words.unit not in ("", "size", "file") else ""
        lines.append(f"# Default: {words.default}{unit}")
        lines.append(f"# {words.name} = {words.example}")
        parts.append("\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _wrap(text: str, width: int = 116) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
