"""Entry points of background workers."""
