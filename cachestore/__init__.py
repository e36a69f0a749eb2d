"""The prefix cache: nodes that hold blocks and snapshots, the index that finds them, transports that move them."""
