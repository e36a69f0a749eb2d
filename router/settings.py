"""The router's settings: names, defaults and checks."""

from __future__ import annotations

from typing import Literal

import msgspec

from moonrelay.errors import SettingsError


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP and gRPC frontends of a cluster; keeps nothing that another router would need."""

    redis_url: str
    model_dir: str  # tokenizer files and config.json; weights are not read
    cluster: str = "local"
    instance_id: str = "router-0"
    listen: str = "127.0.0.1:8000"  # HTTP, host:port; port 0 takes a free one
    grpc_listen: str = "127.0.0.1:8001"
    served_model_name: str = ""  # empty: of model_dir, hyphens for underscores
    ready_file: str = ""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    default_max_tokens: int = 2_048  # where the request says nothing, if the context has that much room
    body_bytes_max: int = 64 << 20  # a million ids are 8 MB of JSON
    in_flight_max: int = 256  # requests being served; each holds a prompt and two streams
    queue_len_max: int = 256  # requests waiting, for a place in flight and for room on a worker together
    queue_timeout_ms: int = 30_000
    room_retry_ms: int = 50  # how often the head of the queue asks full workers again; other routers free room too

    request_deadline_ms: int = 600_000  # the longest life of a request; a client may ask for less
    connect_timeout_ms: int = 2_000
    rpc_timeout_ms: int = 5_000  # match, reserve, release: calls that do not wait for memory
    stall_timeout_ms: int = 120_000  # longest silence of a worker that has begun, and of a client that reads
    body_timeout_ms: int = 30_000
    suspect_ms: int = 2_000  # how long a worker that could not be reached is passed over
    recovery_wait_ms: int = 30_000  # how long a broken request waits for workers to come back
    retries_max: int = 1  # workers lost before the first token reached the client
    recoveries_max: int = 2  # workers lost after it
    attempts_max: int = 8  # all tries of a request, those that reached nobody included
    encodings_tokens_max: int = 2_000_000  # ids of texts that may come again: 4 bytes each, and the texts
    ids_ttl_s: int = 14_400  # how long a turn's generated ids wait for the request that sends its text back
    ids_bytes_max: int = 1 << 20  # of one turn; a longer one is tokenised anew
    ids_timeout_ms: int = 100  # for asking Redis about them: not knowing costs less than waiting
    drain_ms: int = 8_000  # what requests in flight are given when the process is told to stop

    def __post_init__(self) -> None:
        for name in ("listen", "grpc_listen"):
            host_and_port(getattr(self, name), name)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value < (0 if name in ("retries_max", "recoveries_max") else 1):
                raise SettingsError(f"{name}: expected a positive number, found {value}")
        if self.queue_timeout_ms > self.request_deadline_ms:
            at_most = f"at most request_deadline_ms, {self.request_deadline_ms}"
            raise SettingsError(f"queue_timeout_ms: expected {at_most}, found {self.queue_timeout_ms}")


def host_and_port(value: str, name: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host stands in brackets. Raises SettingsError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise SettingsError(f"{name}: expected host:port, found {value!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
