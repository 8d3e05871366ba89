"""Who sent a request, according to its body."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

MAX_ID = 128
# Without control characters, which not every database stores.
Name = Annotated[str, Field(max_length=MAX_ID, pattern=r"^[^\x00-\x1f\x7f]*$")]
_NAME = TypeAdapter(Name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who sent a request, according to its body."""

    user: str = ""
    session: str = ""
    tenant: str = ""
    record: bool = True  # False: "store": false
    cache_salt: str = ""  # vLLM's

    @property
    def salt(self) -> str:
        """What its prompts in the cache are kept apart by: all that the request says of its sender, but the
        session, of which a user has several."""
        parts = (self.tenant, self.user, self.cache_salt)
        return json.dumps(parts) if any(parts) else ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Asker:
        """From OpenAI's ``user``, ``safety_identifier``, ``store`` and ``metadata``, Anthropic's
        ``metadata.user_id``."""
        found = fields.get("metadata")
        metadata = found if isinstance(found, dict) else {}
        users = (fields.get("user"), fields.get("safety_identifier"), metadata.get("user_id"))
        return cls(
            user=next((_name(user) for user in users if user), ""),
            session=_name(metadata.get("session_id", "")),
            tenant=_name(metadata.get("tenant", "")),
            record=fields.get("store") is not False,
            cache_salt=_name(fields.get("cache_salt") or ""),
        )


def _name(given: Any) -> str:
    """A name as events allow it; the hash of any other value."""
    try:
        return _NAME.validate_python(given, strict=True)
    except ValidationError:
        return hashlib.sha256(repr(given).encode()).hexdigest()


def canary_arm(user: str, round: int, share: float) -> tuple[str, float]:
    """("canary" or "control", the probability of that arm): the same user stays in one arm for a round."""
    digest = hashlib.sha256(f"{round}/{user}".encode()).digest()
    chosen = int.from_bytes(digest[:7]) / 2**56 < share
    return ("canary", share) if chosen else ("control", 1 - share)
