"""Keys are read from the command line and a file, found in constant time, and limited."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rewarm.errors import InvalidOption
from rewarm.server import keys
from rewarm.server.keys import KeyRing, tenant_of

FILE = """
[[keys]]
name = "ada"
key = "ada's key"
admin = true

[[keys]]
name = "ben"
sha256 = "{digest}"
requests_per_minute = 2

[[keys]]
name = "cleo"
key = "cleo's key"
salt = "the team's"

[[keys]]
name = "dan"
key = "dan's key"
salt = "the team's"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys.toml"
    found.write_text(FILE.format(digest=hashlib.sha256(b"ben's key").hexdigest()))
    return found


def test_a_lone_key_is_its_own_admin_and_has_no_salt() -> None:
    key = KeyRing(["only"]).find("only")
    assert key is not None
    assert (key.admin, key.salt(None), key.salt("mine")) == (True, None, "mine")
    assert KeyRing(["only"]).find("other") is None
    assert not KeyRing()


def test_of_several_keys_only_marked_ones_are_admins(path: Path) -> None:
    ring = KeyRing(path=path)
    admins = [ring.find(f"{name}'s key").admin for name in ("ada", "ben", "cleo")]  # type: ignore[union-attr]
    assert admins == [True, False, False]
    assert not any(key.admin for key in KeyRing(["one", "two"]).keys)


def test_a_key_and_its_digest_have_the_same_salt(path: Path) -> None:
    ring = KeyRing(path=path)
    ben = ring.find("ben's key")
    assert ben is not None
    assert ben.salt(None) == tenant_of(hashlib.sha256(b"ben's key").digest())


def test_keys_share_a_salt_only_where_the_file_says_so(path: Path) -> None:
    by_name = {key.name: key.salt(None) for key in KeyRing(path=path).keys}
    assert by_name["cleo"] == by_name["dan"]
    assert len(set(by_name.values())) == 3


def test_a_salt_of_the_client_lies_inside_the_keys_own(path: Path) -> None:
    ada, ben, *_ = KeyRing(path=path).keys
    assert ada.salt("x") != ben.salt("x")
    assert ada.owns(ada.salt(None))
    assert ada.owns(ada.salt("x"))
    for salt in (ben.salt(None), ben.salt("x"), ben.salt(f"/{ada.tenant}"), None, "x"):
        assert not ada.owns(salt)
    assert ben.salt(ada.tenant) != ada.salt(None)


def test_nothing_shows_a_key_or_what_is_made_of_it(path: Path) -> None:
    for key in KeyRing(path=path).keys:
        assert key.tenant is not None
        assert key.tenant not in repr(key)
        assert key.digest.hex() not in repr(key)
        assert "digest" not in repr(key)


def test_a_key_may_send_so_many_requests_a_minute(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(keys.time, "monotonic", lambda: now)
    ring = KeyRing(path=path)
    ada, ben, *_ = ring.keys
    assert [ring.wait_for(ben) for _ in range(2)] == [0, 0]
    now += 20
    assert ring.wait_for(ben) == 40
    assert ring.wait_for(ada) == 0
    now += 40
    assert ring.wait_for(ben) == 0


def test_a_changed_file_is_read_again(path: Path) -> None:
    ring = KeyRing(path=path)
    assert not ring.has_changed()
    path.write_text(path.read_text().replace("ada's key", "ada's new key"))
    assert ring.has_changed()
    changes = ring.reload()
    assert [key.name for key in changes.added] == ["ada"]
    assert [key.name for key in changes.removed] == ["ada"]
    assert ring.find("ada's key") is None
    assert ring.find("ada's new key") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs a table"),
        ("a = 1", "needs a table"),
        ("[[keys]\n", "is not TOML"),
        ("keys = 3", "needs a table"),
        ("keys = [3]", "it is no table"),
        ("[[keys]]\nkey = 'x'", "it needs a name"),
        ("[[keys]]\nname = 'x'", "either key or sha256"),
        ("[[keys]]\nname = 'x'\nkey = ''", "key is a text"),
        ("[[keys]]\nname = 'x'\nsha256 = 'beef'", "64 hexadecimal digits"),
        ("[[keys]]\nname = 'x'\nkey = 'y'\nrequests_per_minute = 0", "requests_per_minute=0"),
        ("[[keys]]\nname = 'x'\nkey = 'y'\nadmin = 1", "true or false"),
        ("[[keys]]\nname = 'x'\nkey = 'y'\nadmn = true", "'admn' is unknown"),
        ("[[keys]]\nname = 'x'\nkey = 'y'\n" * 2, "same name"),
        ("[[keys]]\nname = 'x'\nkey = 'y'\n[[keys]]\nname = 'z'\nkey = 'y'", "same key"),
    ],
)
def test_a_wrong_file_is_refused_and_changes_nothing(text: str, says: str, path: Path) -> None:
    ring = KeyRing(path=path)
    path.write_text(text)
    with pytest.raises(InvalidOption, match=says):
        ring.reload()
    assert len(ring.keys) == 4
    with pytest.raises(InvalidOption, match=says):
        KeyRing(path=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"none\.toml.*cannot be read"):
        KeyRing(path=tmp_path / "none.toml")
