"""Every decision of Memora, pure and synchronous: no await, no Redis, no model, no clock, no environment."""
