"""A cache node: registered memory on one host, served by one-sided reads."""
