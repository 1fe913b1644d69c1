"""Commands that measure nothing: they answer from what is stored, look at this machine, or watch
somebody's script. Each is a subcommand of measure.py by being here."""
