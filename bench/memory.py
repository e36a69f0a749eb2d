"""`make bench-memory`: how much a very long prompt costs, and what a cluster at rest costs.

A 131,072-token context (its last token generated) on k3-nano must peak, in the prefill worker, within 1.2 times its
row bytes above the peak of an 8,192-token one. Takes some minutes: attention is quadratic. Writes
bench/results/memory.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = json.loads((ROOT / "model/zoo/k3_nano/config.json").read_text())["text_config"]
DRAFTER = json.loads((ROOT / "model/zoo/k3_nano/drafter/config.json").read_text())
SHORT, LONG = 8_192, 131_071
REST_S = 20.0
TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE_S = 3600


def row_bytes(tokens: int) -> int:
    """fp32 rows of all MLA layers, and of the drafter's behind them."""
    width = CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]
    draft_width = DRAFTER["num_hidden_layers"] * (DRAFTER["kv_lora_rank"] + DRAFTER["qk_rope_head_dim"])
    return tokens * (len(CONFIG["linear_attn_config"]["full_attn_layers"]) * width + draft_width) * 4


def status(pid: int, key: str) -> int:
    """A kB line of /proc/PID/status, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) * 1024


def run(tokens: int, *, rest: bool) -> dict[str, Any]:
    """A fresh cluster, one prompt of `tokens` ids; every role's peak resident bytes."""
    with tempfile.TemporaryDirectory(prefix="moonrelay-memory-") as scratch:
        ready_file = Path(scratch, "ready.json")
        env = {**os.environ, "MOONRELAY_REQUEST_DEADLINE_MS": str(DEADLINE_S * 1000)}
        command = [sys.executable, "-m", "moonrelay", "up", "--port", "0", "--ready-file", str(ready_file)]
        process = subprocess.Popen([*command, "--threads", "2"], env=env)
        try:
            while not ready_file.exists():
                if process.poll() is not None:
                    raise RuntimeError("the cluster did not start")
                time.sleep(0.1)
            ready = json.loads(ready_file.read_text())
            pids = ready["pids"]
            found: dict[str, Any] = {"tokens": tokens}
            if rest:
                before = {name: cpu_seconds(pid) for name, pid in pids.items()}
                time.sleep(REST_S)
                share = {n: round((cpu_seconds(p) - before[n]) / REST_S * 100, 2) for n, p in pids.items()}
                found["rest_cpu_percent"] = share
                total = sum(pss(p) for p in pids.values()) + pss(process.pid)
                found["rest_pss_mib"] = round(total / 2**20)
            body = {"model": "k3-nano", "prompt": [300 + i * 7919 % 5000 for i in range(tokens)], "max_tokens": 1}
            request = urllib.request.Request(
                ready["http"] + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            began = time.monotonic()
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                found["usage"] = json.loads(answer.read())["usage"]
            found["seconds"] = round(time.monotonic() - began, 1)
            found["peak_bytes"] = {name: status(pid, "VmHWM") for name, pid in pids.items()}
            return found
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def main() -> int:
    short, long = run(SHORT, rest=True), run(LONG, rest=False)
    allowed = short["peak_bytes"]["prefill-0"] + 1.2 * row_bytes(LONG)
    result = {"short": short, "long": long, "long_row_bytes": row_bytes(LONG), "allowed_peak_bytes": allowed}
    result["within"] = long["peak_bytes"]["prefill-0"] <= allowed
    (ROOT / "bench/results/memory.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
