"""Scripts in the shape of the published examples: imports beside `utils`, a config file with other people's keys,
options. The tests lay them out as a checkout (tests/samples/published_checkout.py) and run them from its root.

opentinker script opentinker/client/math_rl.py scheduler_url=URL scheduler_api_key=KEY tokenizer_path=MODEL
"""
