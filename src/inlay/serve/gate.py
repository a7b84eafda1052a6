"""What stands before the application: the token, the name it is called by, the size of what is sent, the counting."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from inlay.serve.metrics import Metrics
from inlay.serve.refusals import GONE, Refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OPEN = ("/health", "/")  # what asks whether the service lives need not know its token; the page asks for it
OPENAI = "/v1/"  # below this, requests and errors have OpenAI's shape


class RequestGate:
    """An ASGI application around another."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], *, token: str | None, max_body: int, metrics: Metrics
    ) -> None:
        self.app, self.token, self.max_body, self.metrics = app, token, max_body, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # never what a client wrote: it may write anything
                self.metrics.responses.add(path, str(message["status"]))
                # Looking at the service's own pages is no request to it, and who has gone is told nothing.
                if message["status"] >= 400 and message["status"] != GONE and scope["method"] not in ("GET", "HEAD"):
                    self.metrics.errors.add(str(message["status"]))
            await send(message)

        headers = {key.lower(): value for key, value in scope["headers"]}
        try:
            self._check(scope["path"], headers)
        except Refusal as refusal:
            await refused(refusal, scope["path"])(scope, receive, counted)
            return
        await self.app(scope, self._limited(receive), counted)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self.token is None:
            self._check_name(headers.get(b"host", b"").decode("latin-1"))
        elif path not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.token.encode()):
                raise Refusal(
                    401,
                    "The service needs its token: send the header 'Authorization: Bearer <token>'.",
                    {"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()

    @staticmethod
    def _check_name(host: str) -> None:
        """Without a token, only as a name of this machine: a page in a browser may have its own name point here."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            local = ipaddress.ip_address(name).is_loopback
        except ValueError:
            local = name.lower() == "localhost"
        if not local:
            raise Refusal(403, f"The service is for this machine alone, and is not called {name!r}.")

    def _limited(self, receive: Receive) -> Receive:
        """The body as it comes, but no more of it than is read."""
        seen = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                refusal = self._too_large()
                raise HTTPException(refusal.status, str(refusal))
            return message

        return limited

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The request is larger than the {self.max_body:,} bytes that are read.")


def refused(refusal: Refusal, path: str = "") -> JSONResponse:
    """A refusal as a response to a request for this path."""
    return JSONResponse(error_body(refusal, path), refusal.status, refusal.headers)


def error_body(refusal: Refusal, path: str) -> dict[str, Any]:
    """What a response says of an error: one sentence, or what clients of OpenAI's expect."""
    if not path.startswith(OPENAI):
        return {"error": str(refusal)}
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(refusal.status)
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": code}}
