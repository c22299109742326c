"""`python -m triax`: the command line."""

from triax.cli.app import main

main()
