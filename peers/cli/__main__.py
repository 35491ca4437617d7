"""`python -m peers.cli` is `isthmus`."""

from peers.cli.app import main

main()
