"""Environments whose agent owns the loop: programs and libraries that ask a model over HTTP."""
