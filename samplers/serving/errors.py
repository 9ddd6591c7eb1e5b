"""What a request gets instead of an answer."""

from typing import Any

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
"""Of errors by status; others are the request's below 500 and the server's from there on."""

MESSAGE_TYPES = {**TYPES, 413: "request_too_large", 503: "overloaded_error"}

MESSAGES = "/v1/messages"
"""The path whose errors have Anthropic's form."""


class Fault(Exception):
    """A request that fails, as one of OpenAI's errors, or Anthropic's.

    Attributes:
        status: of HTTP.
        outcome: how the request ended, in the metrics.
        param: the body's field at fault; None where it is none.
        code: the error's name for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        outcome: str = "refused",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.outcome, self.code = status, outcome, code
        sendable = lambda text: text.encode(errors="replace").decode()  # JSON may bring halves of surrogate pairs
        self.message, self.param = sendable(message), None if param is None else sendable(param)

    def body(self, path: str) -> dict[str, Any]:
        """The error as the API at a path writes it."""
        known, server = (MESSAGE_TYPES, "api_error") if path == MESSAGES else (TYPES, "server_error")
        kind = known.get(self.status, "invalid_request_error" if self.status < 500 else server)
        if path == MESSAGES:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def internal_fault() -> Fault:
    """The fault for an unforeseen error, without its message, which may hold another client's words."""
    return Fault(500, "the server made a mistake; its log says where", outcome="failed", code="internal_error")


def stopping_fault() -> Fault:
    """The fault for a request to a server that shuts down."""
    return Fault(503, "the server is stopping", outcome="stopped", code="stopping")
