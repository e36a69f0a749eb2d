"""Sparse experts: who takes a token, and the sum of what they make of it."""
