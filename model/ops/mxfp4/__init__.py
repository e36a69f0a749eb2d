"""Microscaling FP4 weights: E2M1 codes in pairs, one E8M0 scale per 32."""
