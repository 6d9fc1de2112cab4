"""``python -m flowspec``: the command line, where no script is on the path."""

from flowspec.cli import main

main()
