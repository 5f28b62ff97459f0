"""OpenAI's formats <-> our nouns: what is asked over HTTP, and what it is answered. Knows no transport.

`shared/dialects.py` lists the routes and says who serves them.
"""
