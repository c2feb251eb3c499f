"""Property-based tests of cache layouts, with the strategies that others may use."""
