"""A strict stand-in for AITER (see ../README.md)."""
