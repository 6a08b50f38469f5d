"""Memora: a chat service whose conversations never outgrow the model."""

__version__ = "0.1.0"
