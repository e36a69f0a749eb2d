"""The only place where a fault becomes a gRPC status or an HTTP status; a test proves the tables total."""

from __future__ import annotations

import grpc

from moonrelay import errors

GRPC_STATUS: dict[type[errors.ServeError], grpc.StatusCode] = {
    errors.ServeError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.RequestTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextLengthExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TransferError: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.HandoffRefused: grpc.StatusCode.FAILED_PRECONDITION,
}

HTTP_STATUS: dict[type[errors.ServeError], int] = {
    errors.ServeError: 500,
    errors.InvalidRequest: 400,
    errors.UnknownModel: 404,
    errors.RequestTooLarge: 413,
    errors.ContextLengthExceeded: 400,
    errors.Overloaded: 429,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.TransferError: 503,
    errors.StaleEpoch: 503,
    errors.HandoffRefused: 503,
}


def grpc_status(error: errors.ServeError) -> grpc.StatusCode:
    """The status of the nearest class in the error's ancestry that the table names."""
    return next(GRPC_STATUS[kind] for kind in type(error).__mro__ if kind in GRPC_STATUS)


def http_status(error: errors.ServeError) -> int:
    return next(HTTP_STATUS[kind] for kind in type(error).__mro__ if kind in HTTP_STATUS)
