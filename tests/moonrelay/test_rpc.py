"""gRPC's core takes what we ask of it: it only mutters about names that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys

from moonrelay import rpc

OPEN_A_CHANNEL = "from moonrelay import rpc; rpc.prepare(); import grpc; grpc.insecure_channel('localhost:1').close()"


def said(**environ: str) -> str:
    rest = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", OPEN_A_CHANNEL]
    return subprocess.run(command, env={**rest, **environ}, capture_output=True, text=True, check=True).stderr


def test_the_core_knows_what_it_is_asked_for():
    assert rpc.EXPERIMENTS.lstrip("-") not in said()
    assert "no_such_thing" in said(GRPC_EXPERIMENTS="no_such_thing")  # it says so, and the environment's word stays
