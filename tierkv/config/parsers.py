"""Parsers of one value each: what a file, a variable or an option may hold.

Each takes what TOML, the environment (always text) or a program gives, and returns the value, or raises ValueError that
says what to write. `named` makes a pydantic validator of one, whose error names the field.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from tierkv.config.spans import parse_span
from tierkv.core.expiry import DEFAULT
from tierkv.core.shares import ShareName
from tierkv.core.tenancy import TenantName
from tierkv.errors import ConfigError

_TTL_EXAMPLE = '"acme=7d, default=30d"'

_SHARES_EXAMPLE = '"model:llama=40%, tenant:acme=20%"'

MAX_NUMBER = 10**9
MAX_USERS = 64
MAX_DEVICES = 64


def named(parse: Callable[[Any], Any]) -> BeforeValidator:
    """A ValueError of `parse` becomes a ConfigError that names the field."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise ConfigError(info.field_name or "setting", str(error)) from None

    return BeforeValidator(validate)


def parse_number(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{value!r} isn't a number from 0 to {MAX_NUMBER:,}; write it without a unit, like 10 or 2.5")
    return float(value)


def parse_positive(value: object) -> float:
    number = parse_number(value)
    if number == 0:
        raise ValueError("0 isn't possible here; write a number above 0, like 10 or 2.5")
    return number


def parse_ttl(value: object) -> str:
    """How long each tenant's data is kept when nobody uses it, as it is written. `ttl_rules` reads it again."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} isn't a list of times; write one like {_TTL_EXAMPLE}")
    ttl_rules(value)
    return ", ".join(one.strip() for one in value.split(",")) if value.strip() else ""


def ttl_rules(text: str) -> tuple[tuple[str, float], ...]:
    """(name of tenants, seconds), in order. ValueError for what is no such list."""
    rules = {}
    for one in text.split(",") if text.strip() else ():
        name, equals, span = (part.strip() for part in one.rpartition("="))
        if not equals:
            raise ValueError(f"{one.strip()!r} isn't a tenant and its time; write a list like {_TTL_EXAMPLE}")
        seconds = parse_span(span)
        if name != DEFAULT:
            TenantName(name)
        if name in rules:
            raise ValueError(f"{name} comes twice")
        rules[name] = seconds
    return tuple(rules.items())


def parse_shares(value: object) -> str:
    """Whose which part of each tier is, as it is written. `share_rules` reads it again."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} isn't a list of shares; write one like {_SHARES_EXAMPLE}")
    share_rules(value)
    return ", ".join(one.strip() for one in value.split(",")) if value.strip() else ""


def share_rules(text: str) -> tuple[tuple[str, float], ...]:
    """(name of models or tenants, part of the whole), in order. ValueError for what is no such list."""
    rules = {}
    for one in text.split(",") if text.strip() else ():
        name, equals, part = (piece.strip() for piece in one.rpartition("="))
        if not equals:
            raise ValueError(f"{one.strip()!r} isn't a name and its share; write a list like {_SHARES_EXAMPLE}")
        ShareName(name)
        if name in rules:
            raise ValueError(f"{name} comes twice")
        rules[name] = parse_share(part)
    total = sum(rules.values())
    if total > 1 + 1e-9:
        raise ValueError(f"the shares come to {100 * total:g} % in all; write less")
    return tuple(rules.items())


def parse_share(value: object) -> float:
    """A part of a whole, as a number from 0 to 1."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})? ?%", value):
        value = float(value.rstrip(" %")) / 100
    elif isinstance(value, str) and re.fullmatch(r"[01](\.[0-9]{1,9})?", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} isn't a share; write one like 10% or 0.1")
    return float(value)


def whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{value!r} isn't a whole number from {low} to {high}")
        return value

    return parse


def parse_switch(value: object) -> bool:
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} isn't true or false")
    return value


def one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} isn't one of {', '.join(choices)}")
        return str(value)

    return parse


def parse_path(value: object) -> Path:
    """Absolute, `~` expanded, relative to the working directory; symlinks are left for the one who opens it."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} isn't a path; leave the setting out for none")
    if not _is_text(str(value)):
        raise ValueError(f"{value!r} has bytes that are no UTF-8; use a path of text")
    return Path(os.path.abspath(os.path.expanduser(value)))


def _is_text(path: str) -> bool:
    """Bytes that the file system's encoding has no characters for come as lone surrogates, which no message holds."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def parse_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{0,32}", value):
        raise ValueError(f"{value!r} isn't a name; write up to 32 letters, digits, dots, dashes and underscores")
    return value


def parse_host(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9.:_-]{1,255}", value):
        raise ValueError(f"{value!r} isn't an address; write one like 127.0.0.1 or ::1")
    return value


def parse_devices(value: object) -> str:
    """GPUs, by the driver's number, or "cpu", as they are written. `device_names` reads it again."""
    if isinstance(value, list | tuple):
        value = ",".join(str(one) for one in value)
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ValueError(f"{value!r} isn't a list of GPUs; write their numbers with commas between, like 0,1")
    names = device_names(text)
    if len(names) > MAX_DEVICES:
        raise ValueError(f"{len(names)} devices are more than {MAX_DEVICES}")
    return ",".join(names)


def device_names(devices: str) -> tuple[str, ...]:
    """In order: the place of each is its number in the node. ValueError for what is no device, or comes twice."""
    names = tuple(_device_name(one.strip()) for one in devices.split(",")) if devices.strip() else ()
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} comes twice; a device has one pool")
    return names


def _device_name(device: str) -> str:
    """ "cpu:1" and so on are further pools in host memory, so that what several GPUs do can be seen without any."""
    if not re.fullmatch(r"[0-9]{1,4}|cpu(:[1-9][0-9]{0,3})?", device):
        if not device:
            raise ValueError("there is a comma too many; write devices with one comma between, like 0,1")
        raise ValueError(
            f"{device!r} is no device; write the numbers that nvidia-smi shows, like 0,1, or cpu, cpu:1 and so on for "
            "pools in host memory"
        )
    return device if device.startswith("cpu") else str(int(device))


def parse_users(value: object) -> str:
    """Users of this machine, by name or number, as they are written. `user_numbers` reads it again."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ValueError(
            f"{value!r} isn't a list of users; write names or numbers with commas between, like alice,1002"
        )
    numbers = user_numbers(text)
    if len(numbers) > MAX_USERS:
        raise ValueError(f"{len(numbers)} users are more than {MAX_USERS}")
    return ",".join(one.strip() for one in text.split(",")) if text.strip() else ""


def user_numbers(users: str) -> tuple[int, ...]:
    """Each once, in order. ValueError for one that this machine doesn't know."""
    return tuple(dict.fromkeys(_user_number(one.strip()) for one in users.split(","))) if users.strip() else ()


def _user_number(user: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", user):
        number = int(user)
    else:
        try:
            number = pwd.getpwnam(user).pw_uid
        except KeyError:
            raise ValueError(f"{user!r} is no user of this machine; write names or numbers, like alice,1002") from None
    if number >= 2**32 - 1:
        raise ValueError(f"{user} isn't the number of a user")
    if number == _overflow_user():
        raise ValueError(f"{user} stands for everybody whom the kernel can't name here, in containers for one")
    return number


def _overflow_user() -> int:
    """Who the kernel says is at the other end when that user has no number in our user namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65_534
