"""Import paths of the published training server, which is a service of its own here."""
