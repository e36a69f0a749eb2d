"""One folder per operation; each holds a naive twin beside its faster forms."""
