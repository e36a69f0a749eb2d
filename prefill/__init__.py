"""The prefill worker: computes prompts and owns a handoff's memory until the decode side has read it."""
