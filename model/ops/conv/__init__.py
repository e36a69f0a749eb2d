"""The causal depthwise convolution before KDA."""
