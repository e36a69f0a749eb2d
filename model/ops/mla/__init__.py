"""Multi-head latent attention in its absorbed form, over paged rows."""
