"""Bearer tokens: one per session, the admin's, the workers'. Compared in constant time, never logged, and of session
tokens only the sha256 is kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from segue.errors import RequestError


def new_token() -> str:
    return "sk-segue-" + secrets.token_urlsafe(24)


def digest_of(token: str) -> str:
    return hashlib.sha256(_bytes(token)).hexdigest()


def _bytes(token: str) -> bytes:
    """Whatever bytes a header holds; those that are no UTF-8 come as lone surrogates."""
    return token.encode("utf-8", "surrogateescape")


def bearer(headers: Mapping[str, str]) -> str:
    """The request's token. Raises RequestError 401 if there is none (Anthropic clients send x-api-key)."""
    value = headers.get("Authorization", "")
    scheme, _, token = value.partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := headers.get("x-api-key"):
        return key
    raise RequestError(401, "authentication_error", "a bearer token is needed")


@dataclass(frozen=True, slots=True)
class Tokens:
    admin: str
    worker: str

    def is_admin(self, token: str) -> bool:
        return hmac.compare_digest(_bytes(token), _bytes(self.admin))

    def is_worker(self, token: str) -> bool:
        return hmac.compare_digest(_bytes(token), _bytes(self.worker))

    def require_staff(self, headers: Mapping[str, str]) -> None:
        """Admin or worker. Raises RequestError 401."""
        token = bearer(headers)
        if not (self.is_admin(token) | self.is_worker(token)):
            raise RequestError(401, "authentication_error", "this route needs the admin's or a worker's token")

    def require_worker(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError 401, or 403 for the admin's token, which plays no rollouts."""
        token = bearer(headers)
        if not self.is_worker(token):
            if self.is_admin(token):
                raise RequestError(403, "permission_error", "rollouts are leased to workers only")
            raise RequestError(401, "authentication_error", "this route needs a worker's token")

    def require_session(self, headers: Mapping[str, str], token_digest: str) -> None:
        """The session's own token or the admin's. Raises RequestError 401, or 403 for a worker's."""
        token = bearer(headers)
        if hmac.compare_digest(digest_of(token), token_digest) or self.is_admin(token):
            return
        if self.is_worker(token):
            raise RequestError(403, "permission_error", "a session is used with its own token")
        raise RequestError(401, "authentication_error", "this is not the session's token")
