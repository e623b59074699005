"""Fits what calls of a kind cost the host beyond others."""
