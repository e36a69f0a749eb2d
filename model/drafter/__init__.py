"""The draft network: a few layers that look at the target's taps and propose a block of tokens at once."""
