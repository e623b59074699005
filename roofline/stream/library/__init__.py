"""Where op streams come from: shipped, cached, made from others, or traced now. `streams.get_stream` is the door."""
