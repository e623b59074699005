"""Regenerates shipped data: op streams, the intervals' spreads, hosts; reports a profile's coverage."""
