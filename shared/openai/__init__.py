"""OpenAI's formats <-> our nouns: what is asked over HTTP, and what it is answered. Knows no transport.

Two endpoints speak it: the one that an agent's episode has (envs/agents/endpoint.py), and that of inference jobs
(services/scheduler/http/inference.py).
"""
