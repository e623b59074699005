"""The stream that a model, a batch and a width stand for: shipped, cached, made of another one, or traced now."""
