"""The engine: two budgets (row blocks, state slots), ragged continuous batching, sampling."""
