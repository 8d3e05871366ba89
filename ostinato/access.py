"""The rule by which all servers of the package accept or refuse requests, by their headers.

A web page can give its own name the address 127.0.0.1 (DNS rebinding), and it can send a POST of text/plain
to any address without a preflight (CSRF). The first is detected by ``Host``, the second by ``Origin`` and
``Content-Type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

JSON = "application/json"
READ_HEADERS = frozenset({"host", "origin", "content-type", "content-length", "transfer-encoding"})  # headers


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or "localhost"."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Permitted requests. ``hosts``: names of the server beside those of the loopback; without any, a server
    that listens on other addresses may be called by any name. ``origins``: web pages of other addresses that
    may call it, "*" for all. ``types``: media types of bodies."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset({JSON})

    def permit_types(self, *types: str) -> Access:
        """A copy that also permits bodies of further media types."""
        return replace(self, types=self.types | {*types})

    def find_refusal(self, method: str, headers: Mapping[str, str], *, local: bool) -> tuple[int, str] | None:
        """(HTTP status, reason) for a refused request; None for a permitted one.

        ``headers``: those in ``READ_HEADERS``, by lower-case name; ``local``: the server listens on a
        loopback address.
        """
        host = headers.get("host", "")
        if (local or self.hosts) and not self._is_own(host):
            return 403, f"this server is not called {host!r}; allow that name: --allowed-host"
        origin = headers.get("origin", "")
        if origin and not {"*", origin} & self.origins and urlsplit(origin).netloc != host:
            return 403, f"requests of the web page {origin!r} are refused; allow it: --origin"
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if (
            method in ("POST", "PUT", "PATCH", "DELETE")
            and ("transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != "")
            and media_type not in self.types
        ):
            return (
                415,
                f"the body is {media_type or 'of no type'}; send it as Content-Type: {min(self.types)}",
            )
        return None

    def _is_own(self, host: str) -> bool:
        name = _parse_name(host)
        return name is not None and (is_loopback(name) or name in self.hosts)


@lru_cache(256)
def _parse_name(host: str) -> str | None:
    """The name in a Host header, without the port; None for an invalid one."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


STRICT = Access()  # no further names, no pages
