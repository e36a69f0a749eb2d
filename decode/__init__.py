"""The decode worker: reserves, pulls, verifies, adopts, then generates. `--aggregated` does prefill too."""
