"""`python -m opentinker.cli`"""

from opentinker.cli import main

main()
