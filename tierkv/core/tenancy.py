"""Tenants that must not be trusted: what goes before the salt of their identities, so that none can name another's.

    salt in effect = "inline:" | user number, decimal | ":" | the tenant's own salt

A user number has no colon, so (user number, salt) can be read back from it: no two pairs give the same text, whatever a
tenant writes. A session that is trusted may choose any salt, this kind included.
"""

from __future__ import annotations

import msgspec

from tierkv.core.identity import Identity


def tenant_of_user(uid: int) -> str:
    return f"inline:{uid}:"


def under_tenant(identity: Identity, tenant: str) -> Identity:
    """The identity in effect. An empty `tenant` is a session that is trusted: what it says holds."""
    return msgspec.structs.replace(identity, salt=tenant + identity.salt) if tenant else identity
