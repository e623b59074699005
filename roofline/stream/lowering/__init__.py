"""Turns an operation into what a profile is asked for: its class, its kernel variant, FLOPs, bytes and sizes."""
