"""`python -m tierkv_cli`, where the command is not on PATH."""

from tierkv_cli.main import main

main()
