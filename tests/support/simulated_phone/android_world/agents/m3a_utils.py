"""Imported by programs that play on a phone."""
