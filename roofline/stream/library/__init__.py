"""Finds op streams: shipped, cached, derived from others, or traced now. The entry point is `streams.get_stream`."""
