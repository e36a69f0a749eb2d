"""What the prefill and decode workers share: settings, wire forms, memory, cache use, the process around them."""
