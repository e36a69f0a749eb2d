from __future__ import annotations

import grpc
import pytest

from moonrelay import errors
from moonrelay.status import GRPC_STATUS, HTTP_STATUS, grpc_status, http_status


def kinds(root: type) -> set[type]:
    return {root} | {k for child in root.__subclasses__() for k in kinds(child)}


def test_the_tables_are_total() -> None:
    own = {k for k in kinds(errors.ServeError) if k.__module__ == "moonrelay.errors"}
    assert own == GRPC_STATUS.keys() == HTTP_STATUS.keys()


def test_every_code_is_its_own() -> None:
    codes = [k.code for k in HTTP_STATUS]
    assert len(codes) == len(set(codes))


def test_a_subclass_takes_its_parents_status() -> None:
    class Narrow(errors.Overloaded):
        code = "narrow"

    assert grpc_status(Narrow("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert http_status(Narrow("x")) == 429


@pytest.mark.parametrize("kind", sorted(HTTP_STATUS, key=lambda k: k.__name__))
def test_client_faults_are_4xx_and_ours_are_5xx(kind: type) -> None:
    client = issubclass(kind, (errors.InvalidRequest, errors.Overloaded))
    assert (HTTP_STATUS[kind] < 500) is client
