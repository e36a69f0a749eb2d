"""The network's operations: each folder holds a slow twin (`naive`) beside the forms that serve."""
