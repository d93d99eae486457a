"""Engines by name: null (no model, inside the daemon) and transformers (its own process)."""
