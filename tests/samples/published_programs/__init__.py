"""The three programs of the published interface, as they are typed: a game, its training, inference with its model.

The tests copy them into a directory of their own and run them there.
"""
