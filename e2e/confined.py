"""Runs a command under the restrictions of a systemd unit, where there is no systemd:
`python -m e2e.confined UNIT COMMAND...`

System calls, address families, writable and executable memory, capabilities, limits and umask are set as the unit
says. What mounts do for a unit (ProtectSystem and its like) is not: that only takes away files, and the node touches
none but its own two directories.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_MDWE = 38, 24, 65
_MDWE_REFUSE_EXEC_GAIN = 1
_LAST_CAPABILITY = 40
_ALLOW, _ERRNO, _EQUAL = 0x7FFF0000, 0x00050000, 4


class _Compare(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
    )


def directives(unit: Path) -> dict[str, list[str]]:
    """By name, in order."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def system_calls(filters: list[str]) -> set[str]:
    """What a list of SystemCallFilter= leaves allowed."""
    allowed: set[str] = set()
    for one in filters:
        names = {name for word in one.removeprefix("~").split() for name in _members(word)}
        allowed = allowed - names if one.startswith("~") else allowed | names
    return allowed | _members("@default")


def _members(word: str) -> set[str]:
    if not word.startswith("@"):
        return {word}
    said = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", word], capture_output=True, text=True, check=True
    ).stdout
    inner = [line.strip() for line in said.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    return {name for line in inner for name in _members(line)}


def confine(unit: Path) -> None:
    """For this process and all it starts. Raises OSError where the kernel refuses."""
    said = directives(unit)
    for name, limit in (("LimitNOFILE", resource.RLIMIT_NOFILE), ("LimitCORE", resource.RLIMIT_CORE)):
        _, most = resource.getrlimit(limit)
        number = int(said[name][-1]) if most == resource.RLIM_INFINITY else min(int(said[name][-1]), most)
        resource.setrlimit(limit, (number, number))
    os.umask(int(said["UMask"][-1], 8))
    libc = ctypes.CDLL(None, use_errno=True)
    if said["CapabilityBoundingSet"] == [""]:
        for capability in range(_LAST_CAPABILITY + 1):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # one that this process has not is none to drop
    _must(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if said["MemoryDenyWriteExecute"] == ["yes"]:
        _must(libc.prctl(_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN, 0, 0, 0))
    families = [getattr(socket, name) for name in said["RestrictAddressFamilies"][-1].split()]
    _filter(system_calls(said["SystemCallFilter"]), families)


def _filter(allowed: set[str], families: list[int]) -> None:
    seccomp = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    for name in allowed:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # not one of this machine's
        if name == "socket":
            for family in families:
                rule = (_Compare * 1)(_Compare(0, _EQUAL, int(family), 0))
                _must(seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(_ALLOW), number, 1, rule))
        else:
            _must(seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(_ALLOW), number, 0, None))
    _must(seccomp.seccomp_load(context))


def _must(code: int) -> None:
    if code < 0:
        raise OSError(ctypes.get_errno() or -code, os.strerror(ctypes.get_errno() or -code))


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
