"""Operating faults. Bugs are `InvariantError` and end the process; expected outcomes are return values."""

from __future__ import annotations

from typing import ClassVar


class InvariantError(AssertionError):
    """A promise of our own was broken: the process must not go on."""


class SettingsError(ValueError):
    """Settings that cannot work; the message names the setting, what was found and what is expected."""


class ServeError(Exception):
    """A request cannot be served as asked. `code` is the machine-readable reason that reaches the client."""

    code: ClassVar[str] = "internal_error"


class InvalidRequest(ServeError):
    """The client must change something; `param` names the field."""

    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InvalidRequest):
    code: ClassVar[str] = "model_not_found"


class RequestTooLarge(InvalidRequest):
    code: ClassVar[str] = "request_too_large"


class ContextLengthExceeded(InvalidRequest):
    code: ClassVar[str] = "context_length_exceeded"


class Overloaded(ServeError):
    """No room now; `retry_after_s` is a hint."""

    code: ClassVar[str] = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(ServeError):
    """A needed role is not there; the request may be sent again."""

    code: ClassVar[str] = "unavailable"


class DeadlineExceeded(ServeError):
    code: ClassVar[str] = "deadline_exceeded"


class TransferError(ServeError):
    """Bytes could not be moved: the peer is gone, refused, or too slow."""

    code: ClassVar[str] = "transfer_failed"


class StaleEpoch(ServeError):
    """The peer restarted since this address was learned."""

    code: ClassVar[str] = "stale_epoch"


class HandoffRefused(ServeError):
    """A manifest that this worker must not adopt; `reason` is a closed word for metrics."""

    code: ClassVar[str] = "handoff_refused"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
