"""Every matrix product of the network, expert products included."""
