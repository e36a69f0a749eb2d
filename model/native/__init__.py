"""The C++ backend: the whole network over a ragged batch in one call. See `backend.NativeBackend`."""
