"""Built-in environments: small, deterministic, without data files. None imports torch."""
