"""The cluster in one thread: deterministic simulation and trace replay."""
