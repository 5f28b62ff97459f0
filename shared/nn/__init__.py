"""The heavy side of shared: everything here may import torch; nothing else in `shared` imports it."""
