"""The HTTP door: an OpenAI-compatible server over conversations that never outgrow the model."""
