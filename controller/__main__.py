from controller.loop import cli

raise SystemExit(cli())
