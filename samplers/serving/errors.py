"""What is answered instead of a completion."""

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class Fault(Exception):
    """A request that gets no completion, in the words of OpenAI's errors.

    Attributes:
        status: of the answer.
        outcome: in the metrics: what became of the request.
        param: the field of the body that is at fault, if it is one.
        code: for programs.
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

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unexpected() -> Fault:
    """Of an error that nobody foresaw; what it says may hold another's text, so it is not told."""
    return Fault(500, "the server made a mistake; its log says where", outcome="failed", code="internal_error")


def stopping() -> Fault:
    """Of a server that ends."""
    return Fault(503, "the server is stopping", outcome="stopped", code="stopping")
