"""Tenants that must not be trusted: what goes before the salt of their identities, so that none can name another's.

    salt in effect = "inline:" | user number, decimal | ":" | the tenant's own salt

A user number has no colon, so (user number, salt) can be read back from it: no two pairs give the same text, whatever a
tenant writes. A session that is trusted may choose any salt, this kind included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from tierkv.core.identity import Identity


def tenant_of_user(uid: int) -> str:
    return f"inline:{uid}:"


def under_tenant(identity: Identity, tenant: str) -> Identity:
    """The identity in effect. An empty `tenant` is a session that is trusted: what it says holds."""
    return msgspec.structs.replace(identity, salt=tenant + identity.salt) if tenant else identity


NO_TENANT = "none"
DIGEST, USER = "digest:", "user:"


@dataclass(frozen=True, slots=True)
class TenantName:
    """How a setting names tenants.

    none               who has no salt                digest:0123abcd    a salt, by 8 or more digits of its digest
    user:1001          an inline user, with any salt  anything else      exactly this salt

    Raises ValueError that says what to write, for what looks like one of these and is none."""

    text: str

    def __post_init__(self) -> None:
        if self.text.startswith(DIGEST) and not re.fullmatch(r"digest:[0-9a-f]{8,64}", self.text):
            raise ValueError(
                f"{self.text!r}: write 8 to 64 digits as `tierkv du --by tenant` shows them, digest:0123abcd"
            )
        if self.text.startswith(USER) and not re.fullmatch(r"user:(0|[1-9][0-9]{0,9})", self.text):
            raise ValueError(f"{self.text!r}: write the number of a user, like user:1001")
        if not self.text:
            raise ValueError("a tenant has no name; write none for what has no salt")

    def covers(self, salt: str) -> bool:
        if self.text == NO_TENANT:
            return not salt
        if self.text.startswith(DIGEST):
            return bool(salt) and blake3(salt.encode()).hexdigest().startswith(self.text.removeprefix(DIGEST))
        if self.text.startswith(USER):
            return salt.startswith(tenant_of_user(int(self.text.removeprefix(USER))))
        return salt == self.text
