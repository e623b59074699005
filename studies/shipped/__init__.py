"""Makers of what ships as data: op streams, suites, the intervals' spreads, hosts."""
