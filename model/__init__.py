"""K3-class hybrid models: config, weights, layers, tokenizer, renderer, parser. Importing this imports no torch."""
