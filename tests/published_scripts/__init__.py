"""Programs in the shape of the published examples: imports beside `utils`, a config with attributes, options.

python -m opentinker.client tests/published_scripts/math_rl.py scheduler_url=URL tokenizer_path=MODEL data_path=FILE
"""
