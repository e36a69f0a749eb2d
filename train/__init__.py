"""Training of the small model k3-nano: corpus, network, run, export and evaluation."""
