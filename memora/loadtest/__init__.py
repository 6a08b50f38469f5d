"""A load test: many conversations, by a schedule that waits for nobody, and a verdict on what became of them."""
