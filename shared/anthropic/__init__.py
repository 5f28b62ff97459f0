"""Anthropic's Messages API <-> our nouns. Built on the parts of `shared/openai`, and like it knows no transport."""
