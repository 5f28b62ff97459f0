"""Environments whose agent owns the loop: programs and libraries that call a model over HTTP."""
