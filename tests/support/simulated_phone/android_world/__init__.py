"""A simulated phone by the interface of the library of this name."""
