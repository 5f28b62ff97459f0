"""Import paths of the published training server, which is a separate service here."""
