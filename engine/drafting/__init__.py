"""Where draft rows come from."""
