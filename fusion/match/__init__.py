"""See docs/architecture.md for what lives on this floor."""
