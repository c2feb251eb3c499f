"""fusion: fuse attention prologues and bind non-causal attention in ``torch.compile`` graphs."""

__version__ = "0.1.0"
