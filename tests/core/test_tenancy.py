"""What goes before a tenant's salt: no tenant can name what is another's."""

from __future__ import annotations

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.samples import _IDENTITY as IDENTITY
from tierkv.core.tenancy import tenant_of_user, under_tenant

USERS = st.integers(0, 2**32 - 1)
SALTS = st.text(max_size=40) | st.from_regex(r"(inline:)?[0-9]{0,4}:?[0-9:]{0,6}", fullmatch=True)


@settings(deadline=None)
@given(USERS, SALTS, USERS, SALTS)
@example(1, "2:x", 12, "x")
@example(1, ":", 1, "::")
@example(1, "inline:1:", 1, "")
@example(0, "", 0, "inline:0:")
def test_two_users_or_two_salts_never_give_one_group(one: int, salt: str, other: int, other_salt: str) -> None:
    first = under_tenant(msgspec.structs.replace(IDENTITY, salt=salt), tenant_of_user(one))
    second = under_tenant(msgspec.structs.replace(IDENTITY, salt=other_salt), tenant_of_user(other))
    assert (first.group_key() == second.group_key()) == ((one, salt) == (other, other_salt))


@settings(deadline=None)
@given(USERS, SALTS)
def test_no_salt_of_a_tenant_reaches_the_group_of_an_engine_that_names_none(user: int, salt: str) -> None:
    named = msgspec.structs.replace(IDENTITY, salt=salt)
    in_effect = under_tenant(named, tenant_of_user(user))
    assert in_effect.group_key() not in (named.group_key(), msgspec.structs.replace(IDENTITY, salt="").group_key())


def test_nothing_but_the_salt_is_touched_and_a_trusted_session_is_believed() -> None:
    in_effect = under_tenant(IDENTITY, tenant_of_user(7))
    assert msgspec.structs.replace(in_effect, salt=IDENTITY.salt) == IDENTITY
    assert under_tenant(IDENTITY, "") is IDENTITY
    chosen = msgspec.structs.replace(IDENTITY, salt="inline:7:" + IDENTITY.salt)
    assert chosen == in_effect  # a trusted session may choose any salt: docs/tenants.md
